// The kernel of digests. Compiled at run time by NVRTC for the card at hand, beside sum.h; or
// beforehand: nvcc -ptx -arch=compute_80 sum.cu -o sum.ptx
//
// A warp takes a unit at a time, and writes its sum to the unit's place in `sums`.

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define KD_FN static __device__ __forceinline__
#define KD_HIGH(a, b) __umul64hi(a, b)
#define KD_UNROLL _Pragma("unroll")
#define KD_ALIGNED __align__(16)
// Each byte is read once: it need not stay in a cache.
#define KD_WORDS(address, words)                                                                    \
    do {                                                                                            \
        uint4 kd_four = __ldcs((const uint4 *)(address));                                           \
        (words)[0] = kd_four.x, (words)[1] = kd_four.y;                                             \
        (words)[2] = kd_four.z, (words)[3] = kd_four.w;                                             \
    } while (0)
#define KD_BYTE(address) (*(const uint8_t *)(address))

#include "sum.h"

#define KD_THREADS 256

extern "C" __global__ void __launch_bounds__(KD_THREADS, 2)
    kvferry_digest(const kd_header *program, kd_pair *sums)
{
    const uint32_t lane = threadIdx.x % KD_WARP;
    const uint32_t warps = gridDim.x * (KD_THREADS / KD_WARP);
    uint32_t unit = blockIdx.x * (KD_THREADS / KD_WARP) + threadIdx.x / KD_WARP;
    for (; unit < program->units; unit += warps) {
        kd_pair sum = kd_lane(program, unit, lane);
        for (uint32_t distance = KD_WARP / 2; distance > 0; distance /= 2) {
            sum.first = kd_add(sum.first, __shfl_xor_sync(~0u, sum.first, distance));
            sum.second = kd_add(sum.second, __shfl_xor_sync(~0u, sum.second, distance));
        }
        if (lane == 0)
            sums[unit] = sum;
    }
}
