// The kernels of the cuda back end. Compiled at run time by NVRTC for the card at hand, beside
// loops.h; or beforehand to PTX for sm_80 and newer:
//
//   nvcc -ptx -arch=compute_80 copy.cu -o copy.ptx
//
// CUDA 12.1 or newer: parameters of a kernel may be longer than 4 KB since then.
//
// One launch carries out one program. Each warp of all CTAs starts with the batch of its number; the
// others go to whichever warp is free, so that all of them end together, and work in one stretch of
// memory at a time. The last CTA to end sets the signal that the host looks at.

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
// Without hints to the caches: on an H200 those cost a little.
#define KV_LOAD(TYPE, address) (*(const TYPE *)(address))
#define KV_STORE(TYPE, address, value) (*(TYPE *)(address) = (value))

typedef uint4 kv_word16;
typedef uint2 kv_word8;
typedef uint32_t kv_word4;
typedef uint16_t kv_word2;
typedef uint8_t kv_word1;

#include "loops.h"

// At most; line.rs may start fewer.
#define KV_THREADS 768

static __device__ __forceinline__ void kv_run(const kv_header *program)
{
    __shared__ kv_places places[KV_THREADS / KV_WARP];
    extern __shared__ uint4 tiles[];
    const uint32_t warp = threadIdx.x / KV_WARP;
    void *tile = (unsigned char *)tiles + warp * KV_TILE_BYTES;
    kv_counts *counts = (kv_counts *)program->counts;
    const uint32_t batches = program->batches, warps = gridDim.x * (blockDim.x / KV_WARP);
    uint32_t batch = warp * gridDim.x + blockIdx.x;
    while (batch < batches) {
        // Asked for before it is needed.
        uint32_t next = 0;
        if (threadIdx.x % KV_WARP == 0 && warps < batches)
            next = warps + atomicAdd(&counts->dealt, 1);
        kv_carry_out(program, batch, places + warp, tile);
        batch = warps < batches ? __shfl_sync(~0u, next, 0) : batches;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&counts->ended, 1) == gridDim.x - 1) {
            counts->dealt = 0;
            counts->ended = 0;
            __threadfence_system();
            *(volatile uint32_t *)program->signal = 1;
        }
    }
}

// The program is in the card's memory.
extern "C" __global__ void __launch_bounds__(KV_THREADS, 1) kvferry_copy(const kv_header *program)
{
    kv_run(program);
}

// A program that is not too long travels with the launch itself: nothing is uploaded. Every launch
// carries all of its parameter, so there are several lengths; line.rs knows them. Longer ones are
// uploaded: that takes less time from 12,000 bytes on.
template <uint32_t BYTES> struct alignas(16) kv_inline {
    unsigned char bytes[BYTES];
};

#define KV_INLINE(BYTES)                                                                            \
    extern "C" __global__ void __launch_bounds__(KV_THREADS, 1)                                     \
        kvferry_copy_##BYTES(const __grid_constant__ kv_inline<BYTES> program)                      \
    {                                                                                               \
        kv_run((const kv_header *)&program);                                                        \
    }
KV_INLINE(1000)
KV_INLINE(4000)
KV_INLINE(8000)
