// The kernel of digests. Compiled at run time by NVRTC for the card at hand, beside sum.h; or
// beforehand: nvcc -ptx -arch=compute_80 sum.cu -o sum.ptx
//
// A warp takes a unit at a time, and writes its sum to the unit's place in `sums`.

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define KD_FN static __device__ __forceinline__
#define KD_HIGH(a, b) __umul64hi(a, b)
#define KD_PERMUTE(a, b, selector) __byte_perm(a, b, selector)
#define KD_UNROLL _Pragma("unroll")
#define KD_ALIGNED __align__(16)
#define KD_FOUR(words, read)                                                                        \
    do {                                                                                            \
        const uint4 kd_four = read;                                                                 \
        (words)[0] = kd_four.x, (words)[1] = kd_four.y;                                             \
        (words)[2] = kd_four.z, (words)[3] = kd_four.w;                                             \
    } while (0)
// Each byte is read once: it need not stay in a cache.
#define KD_LOAD(address, words) KD_FOUR(words, __ldcs((const uint4 *)(address)))
#define KD_FETCH(pointer, words) KD_FOUR(words, __ldg((const uint4 *)(pointer)))
#define KD_BYTE(address) (*(const uint8_t *)(address))

#include "sum.h"

// Threads of a CTA, and CTAs of a multiprocessor, as in mod.rs.
#define KD_THREADS 256
#define KD_CTAS 2

// Adds 16 x 32 factors times 32 x 8 bytes to 16 x 8 sums.
KD_FN void kd_multiply_tile(int32_t sums[4], const uint32_t factors[4], const uint32_t bytes[2])
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(factors[0]), "r"(factors[1]), "r"(factors[2]), "r"(factors[3]), "r"(bytes[0]),
          "r"(bytes[1]));
}

// What a lane has of the tiles of a unit. All lanes of a warp are here at the same time.
KD_FN kd_pair kd_tile_sum(const kd_header *program, const kd_nest *nest, uint32_t unit, uint32_t lane)
{
    const kd_batch *batches = (const kd_batch *)kd_at(program, program->batches);
    const kd_tiles tiles = kd_tiles_of(program, nest, unit, lane);
    int32_t products[KD_BYTES][4] = {{0}};
    uint32_t offsets[KD_LOADS], factors[4];
    kd_offsets(batches + tiles.from, tiles.quarter, offsets);
    for (uint32_t at = tiles.from; at < tiles.to; ++at) {
        uint32_t words[KD_LOADS][4], turned[KD_BYTES][2];
        kd_load(tiles.address, offsets, words);
        KD_FETCH(batches[at].factors[lane], factors);
        // Where the next ones are, before these are waited for.
        kd_offsets(batches + (at + 1 < tiles.to ? at + 1 : at), tiles.quarter, offsets);
        kd_turn(words, turned);
        KD_UNROLL
        for (uint32_t byte = 0; byte < KD_BYTES; ++byte)
            kd_multiply_tile(products[byte], factors, turned[byte]);
    }
    return kd_weigh(program, nest, &tiles, lane, products);
}

extern "C" __global__ void __launch_bounds__(KD_THREADS, KD_CTAS)
    kvferry_digest(const kd_header *program, kd_pair *sums)
{
    const uint32_t lane = threadIdx.x % KD_WARP;
    const uint32_t warps = gridDim.x * (KD_THREADS / KD_WARP);
    uint32_t unit = blockIdx.x * (KD_THREADS / KD_WARP) + threadIdx.x / KD_WARP;
    for (; unit < program->units; unit += warps) {
        const kd_nest *nest = kd_find(program, unit);
        kd_pair sum = nest->kind == KD_TILE ? kd_tile_sum(program, nest, unit, lane)
                                            : kd_words(program, nest, unit, lane);
        for (uint32_t distance = KD_WARP / 2; distance > 0; distance /= 2) {
            sum.first = kd_add(sum.first, __shfl_xor_sync(~0u, sum.first, distance));
            sum.second = kd_add(sum.second, __shfl_xor_sync(~0u, sum.second, distance));
        }
        if (lane == 0)
            sums[unit] = sum;
    }
}
