// A stand-in for the kernels of a decode step: it reads weights as fast as the card can, and multiplies them.

typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

static __device__ __forceinline__ float times(uint32_t word, float by)
{
    return __int_as_float(word << 16) * by + __int_as_float(word & 0xffff0000u) * by;
}

// Each CTA reads a contiguous part, as the tiles of a matrix are read. `shared` keeps other CTAs away where there is
// much of it.
extern "C" __global__ void __launch_bounds__(256) layer(const uint4 *weights, uint64_t words, float by, float *out)
{
    extern __shared__ uint4 shared[];
    const uint64_t part = words / gridDim.x;
    const uint4 *from = weights + part * blockIdx.x;
    float sums[4] = {0, 0, 0, 0};
    for (uint64_t at = threadIdx.x; at + 768 < part; at += 1024) {
        uint4 values[4];
#pragma unroll
        for (int deep = 0; deep < 4; ++deep)
            values[deep] = from[at + deep * 256];
#pragma unroll
        for (int deep = 0; deep < 4; ++deep)
            sums[deep] += times(values[deep].x, by) + times(values[deep].y, by) + times(values[deep].z, by) +
                          times(values[deep].w, by);
    }
    const float sum = sums[0] + sums[1] + sums[2] + sums[3];
    // Never, but the compiler does not know.
    if (sum == 12345.678f)
        out[threadIdx.x] = sum + (float)shared[0].x;
}
