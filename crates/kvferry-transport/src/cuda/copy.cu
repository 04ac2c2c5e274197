// The kernels of the cuda back end. Compiled at run time by NVRTC for the card at hand, beside
// loops.h; or beforehand to PTX for sm_80 and newer:
//
//   nvcc -ptx -arch=compute_80 copy.cu -o copy.ptx
//
// One launch carries out one program. Batches are dealt out to the warps of all CTAs in turn, so that a
// short program uses all multiprocessors it may, and a long one keeps neighbours together.

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define KV_FN static __device__ __forceinline__
// Not inlined: together they would need more registers than a thread of a full CTA has.
#define KV_APART static __device__ __noinline__
#define KV_LANES for (uint32_t lane = threadIdx.x % 32u, kv_once = 1; kv_once; kv_once = 0)
#define KV_TOGETHER __syncwarp()
#define KV_UNROLL _Pragma("unroll")
#define KV_ROLLED _Pragma("unroll 1")
#define KV_SHARED(pointer) __builtin_assume(__isShared(pointer))
#define KV_FORGET(variable) asm volatile("" : "+r"(variable))
#define KV_FORGET_ADDRESS(variable) asm volatile("" : "+l"(variable))
// Each byte is read once and written once: it need not stay in a cache.
#ifndef KV_LOAD_16
#define KV_LOAD_16 "ld.global.cs"
#endif
#ifndef KV_STORE_16
#define KV_STORE_16 "st.global.cs"
#endif
template <class T> static __device__ __forceinline__ T kv_load(const T *from)
{
    return __ldcs(from);
}
template <> __device__ __forceinline__ uint4 kv_load(const uint4 *from)
{
    uint4 value;
    asm volatile(KV_LOAD_16 ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}
template <class T> static __device__ __forceinline__ void kv_store(T *to, T value)
{
    __stcs(to, value);
}
template <> __device__ __forceinline__ void kv_store(uint4 *to, uint4 value)
{
    asm volatile(KV_STORE_16 ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}
#define KV_LOAD(TYPE, address) kv_load((const TYPE *)(address))
#define KV_STORE(TYPE, address, value) kv_store((TYPE *)(address), value)

typedef uint4 kv_word16;
typedef uint2 kv_word8;
typedef uint32_t kv_word4;
typedef uint16_t kv_word2;
typedef uint8_t kv_word1;

#include "loops.h"

#ifndef KV_THREADS
#define KV_THREADS 1024
#endif
#ifndef KV_CTAS
#define KV_CTAS 1
#endif
#ifndef KV_ORDER
#define KV_ORDER 0
#endif

static __device__ __forceinline__ void kv_run(const kv_header *program)
{
    __shared__ kv_places places[KV_THREADS / KV_WARP];
    extern __shared__ uint4 tiles[];
    const uint32_t warp = threadIdx.x / KV_WARP;
    void *tile = (unsigned char *)tiles + warp * KV_TILE_BYTES;
    const uint32_t batches = program->batches, warps = gridDim.x * (KV_THREADS / KV_WARP);
#if KV_ORDER == 0 // neighbours on different CTAs
    for (uint32_t batch = warp * gridDim.x + blockIdx.x; batch < batches; batch += warps)
#elif KV_ORDER == 1 // neighbours on one CTA
    for (uint32_t batch = blockIdx.x * (KV_THREADS / KV_WARP) + warp; batch < batches; batch += warps)
#else // each CTA has a part of its own
    const uint32_t part = (batches + gridDim.x - 1) / gridDim.x, begin = part * blockIdx.x;
    for (uint32_t batch = begin + warp; batch < min(begin + part, batches);
         batch += KV_THREADS / KV_WARP)
#endif
        kv_carry_out(program, batch, places + warp, tile);
}

// The program is in the card's memory.
extern "C" __global__ void __launch_bounds__(KV_THREADS, KV_CTAS)
    kvferry_copy(const kv_header *program)
{
    kv_run(program);
}

// A short program travels with the launch itself: nothing is uploaded.
template <uint32_t BYTES> struct alignas(16) kv_inline {
    unsigned char bytes[BYTES];
};

#define KV_INLINE(BYTES)                                                                            \
    extern "C" __global__ void __launch_bounds__(KV_THREADS, KV_CTAS)                               \
        kvferry_copy_##BYTES(const __grid_constant__ kv_inline<BYTES> program)                      \
    {                                                                                               \
        kv_run((const kv_header *)&program);                                                        \
    }
KV_INLINE(4000)
#if KV_LONG
KV_INLINE(8000)
KV_INLINE(16000)
KV_INLINE(32000)
#endif
