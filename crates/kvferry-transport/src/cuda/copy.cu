// The kernels of the cuda back end. Compiled at run time by NVRTC for the card at hand, beside
// loops.h; or beforehand to PTX for sm_80 and newer:
//
//   nvcc -ptx -arch=compute_80 copy.cu -o copy.ptx
//
// CUDA 12.1 or newer: parameters of a kernel may be longer than 4 KB since then.
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
#define KV_LOAD(TYPE, address) __ldcs((const TYPE *)(address))
#define KV_STORE(TYPE, address, value) __stcs((TYPE *)(address), value)

typedef uint4 kv_word16;
typedef uint2 kv_word8;
typedef uint32_t kv_word4;
typedef uint16_t kv_word2;
typedef uint8_t kv_word1;

#include "loops.h"

#define KV_THREADS 1024

static __device__ __forceinline__ void kv_run(const kv_header *program)
{
    __shared__ kv_places places[KV_THREADS / KV_WARP];
    extern __shared__ uint4 tiles[];
    const uint32_t warp = threadIdx.x / KV_WARP;
    void *tile = (unsigned char *)tiles + warp * KV_TILE_BYTES;
    const uint32_t batches = program->batches, warps = gridDim.x * (KV_THREADS / KV_WARP);
    for (uint32_t batch = warp * gridDim.x + blockIdx.x; batch < batches; batch += warps)
        kv_carry_out(program, batch, places + warp, tile);
}

// The program is in the card's memory.
extern "C" __global__ void __launch_bounds__(KV_THREADS, 1) kvferry_copy(const kv_header *program)
{
    kv_run(program);
}

// A program that is not too long travels with the launch itself: nothing is uploaded. Every launch
// carries all of its parameter, so there are several lengths; mod.rs knows them.
template <uint32_t BYTES> struct alignas(16) kv_inline {
    unsigned char bytes[BYTES];
};

#define KV_INLINE(BYTES)                                                                            \
    extern "C" __global__ void __launch_bounds__(KV_THREADS, 1)                                     \
        kvferry_copy_##BYTES(const __grid_constant__ kv_inline<BYTES> program)                      \
    {                                                                                               \
        kv_run((const kv_header *)&program);                                                        \
    }
KV_INLINE(4000)
KV_INLINE(8000)
KV_INLINE(16000)
KV_INLINE(32000)
