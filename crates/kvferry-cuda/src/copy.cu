// The kernels of the cuda back end. Compiled at run time by NVRTC for the card at hand, beside
// loops.h; or beforehand to PTX for sm_80 and newer:
//
//   nvcc -ptx -arch=compute_80 copy.cu -o copy.ptx
//
// CUDA 12.1 or newer: parameters of a kernel may be longer than 4 KB since then.
//
// One launch carries out one program. Each warp of all CTAs starts with the batch of its number; the
// others go to whichever warp is free, so that all of them end together, and work in one stretch of
// memory at a time. The last CTA to end sets the signal that the host looks at. Where the launch behind
// this one may overlap it, that one begins on multiprocessors that are free as soon as little is left here:
// on an H200, a short request that is read from four sources takes 6 % less time than if it began when
// nothing is left, and if it began at once, the first request of several would take 20 % longer. It ends
// after this one, so that a stream has ended when all of its launches have.

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
// Past the cache of the multiprocessor: it may hold what the launch before has read, and nothing is read
// twice. Other hints to the caches cost a little on an H200.
#define KV_LOAD(TYPE, address) __ldcg((const TYPE *)(address))
#define KV_STORE(TYPE, address, value) (*(TYPE *)(address) = (value))

typedef uint4 kv_word16;
typedef uint2 kv_word8;
typedef uint32_t kv_word4;
typedef uint16_t kv_word2;
typedef uint8_t kv_word1;

#include "loops.h"

// So many batches for each warp are little.
enum { KV_FEW = 2 };

template <uint32_t THREADS> static __device__ __forceinline__ void kv_run(const kv_header *program)
{
    __shared__ kv_places places[THREADS / KV_WARP];
    extern __shared__ uint4 tiles[];
    const uint32_t warp = threadIdx.x / KV_WARP;
    void *tile = (unsigned char *)tiles + warp * KV_TILE_BYTES;
    kv_counts *counts = (kv_counts *)program->counts;
    const uint32_t batches = program->batches, warps = gridDim.x * (blockDim.x / KV_WARP);
    uint32_t batch = warp * gridDim.x + blockIdx.x;
    bool let_next_begin = false;
    while (batch < batches) {
#if __CUDA_ARCH__ >= 900
        if (!let_next_begin && batch + KV_FEW * warps >= batches) {
            let_next_begin = true;
            asm volatile("griddepcontrol.launch_dependents;");
        }
#endif
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
#if __CUDA_ARCH__ >= 900
            asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
        }
    }
}

// A program that is not too long travels with the launch itself: nothing is uploaded, and warps look things
// up where it lies. (To copy it to each CTA's shared memory first was no quicker on an H200, and by some
// measures up to 2 % slower.) Every launch carries all of its parameter, so there are several lengths.
// Longer ones are uploaded: that takes less time from 12,000 bytes on.
template <uint32_t BYTES> struct alignas(16) kv_inline {
    unsigned char bytes[BYTES];
};

// The first number in a name is that of the form of programs: FORM in program.rs.
#define KV_INLINE(THREADS, BYTES)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                        \
        kvferry_copy_2_##THREADS##_##BYTES(const __grid_constant__ kv_inline<BYTES> program)        \
    {                                                                                               \
        kv_run<THREADS>((const kv_header *)&program);                                               \
    }

#define KV_KERNELS(THREADS)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                        \
        kvferry_copy_2_##THREADS(const kv_header *program)                                          \
    {                                                                                               \
        kv_run<THREADS>(program);                                                                   \
    }                                                                                               \
    KV_INLINE(THREADS, 1008)                                                                        \
    KV_INLINE(THREADS, 2944)                                                                        \
    KV_INLINE(THREADS, 5008)                                                                        \
    KV_INLINE(THREADS, 8000)

// By the threads of a CTA, as in line.rs. A launch that has most of the card's multiprocessors serves
// its memory best with few threads on each, which then have all the registers that they want. One that
// has few of them needs more loads under way on each.
KV_KERNELS(384)
KV_KERNELS(640)
