/* sum.h on the CPU, for the tests, and the card's matrix units in plain loops. */
#include <stdint.h>
#include <string.h>

#define KD_FN static inline
#define KD_HIGH(a, b) ((uint64_t)((unsigned __int128)(a) * (b) >> 64))
#define KD_UNROLL
#define KD_ALIGNED

/* Counts accesses whose address is not a multiple of their width: the card would refuse them. */
static uint64_t misaligned;

static void four(uint64_t address, uint32_t *words)
{
    misaligned += address % 16 != 0;
    memcpy(words, (const void *)(uintptr_t)address, 16);
}

/* Of the eight bytes of two words, the four that the digits of the selector name. */
static uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector)
{
    uint64_t both = a | (uint64_t)b << 32;
    uint32_t out = 0;
    for (int byte = 0; byte < 4; ++byte)
        out |= (uint32_t)(both >> (selector >> 4 * byte & 7) * 8 & 255) << 8 * byte;
    return out;
}

#define KD_LOAD(address, words) four(address, words)
#define KD_FETCH(pointer, words) four((uint64_t)(uintptr_t)(pointer), words)
#define KD_PERMUTE(a, b, selector) permuted(a, b, selector)
#define KD_BYTE(address) (*(const uint8_t *)(uintptr_t)(address))

#include "sum.h"

/* Adds 16 x 32 factors times 32 x 8 bytes to 16 x 8 sums, all lanes' parts of which are laid out as for
 * mma.m16n8k32: lane 4 g + t has of the factors rows g and g + 8, of the bytes and the sums columns g, and
 * 2 t and 2 t + 1; four at a time from 4 t and from 16 + 4 t on. */
static void multiply_tiles(int32_t sums[KD_WARP][KD_BYTES][4], uint32_t factors[KD_WARP][4],
                           uint32_t turned[KD_WARP][KD_BYTES][2])
{
    for (int byte = 0; byte < KD_BYTES; ++byte) {
        uint8_t left[16][32], right[32][8];
        for (int lane = 0; lane < KD_WARP; ++lane) {
            int g = lane / 4, t = lane % 4;
            for (int half = 0; half < 2; ++half) {
                for (int n = 0; n < 4; ++n) {
                    int k = 16 * half + 4 * t + n;
                    left[g][k] = factors[lane][2 * half] >> 8 * n;
                    left[g + 8][k] = factors[lane][2 * half + 1] >> 8 * n;
                    right[k][g] = turned[lane][byte][half] >> 8 * n;
                }
            }
        }
        for (int lane = 0; lane < KD_WARP; ++lane) {
            for (int n = 0; n < 4; ++n) {
                int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
                for (int k = 0; k < 32; ++k)
                    sums[lane][byte][n] += left[row][k] * right[k][column];
            }
        }
    }
}

static kd_pair tiles(const kd_header *program, const kd_nest *nest, uint32_t unit)
{
    const kd_batch *batches = (const kd_batch *)kd_at(program, program->batches);
    int32_t products[KD_WARP][KD_BYTES][4];
    uint32_t turned[KD_WARP][KD_BYTES][2];
    kd_tiles tiles[KD_WARP];
    kd_pair sum = {0, 0};
    memset(products, 0, sizeof products);
    for (uint32_t lane = 0; lane < KD_WARP; ++lane)
        tiles[lane] = kd_tiles_of(program, nest, unit, lane);
    for (uint32_t at = tiles[0].from; at < tiles[0].to; ++at) {
        uint32_t factors[KD_WARP][4];
        for (uint32_t lane = 0; lane < KD_WARP; ++lane) {
            uint32_t offsets[KD_LOADS], words[KD_LOADS][4];
            kd_offsets(batches + at, tiles[lane].quarter, offsets);
            kd_load(tiles[lane].address, offsets, words);
            KD_FETCH(batches[at].factors[lane], factors[lane]);
            kd_turn((const uint32_t(*)[4])words, turned[lane]);
        }
        multiply_tiles(products, factors, turned);
    }
    for (uint32_t lane = 0; lane < KD_WARP; ++lane) {
        kd_pair one = kd_weigh(program, nest, &tiles[lane], lane, (const int32_t(*)[4])products[lane]);
        sum.first = kd_add(sum.first, one.first);
        sum.second = kd_add(sum.second, one.second);
    }
    return sum;
}

/* Adds up all units; returns how many accesses were misaligned. */
uint64_t kvferry_digest(const void *program, kd_pair *sums)
{
    const kd_header *header = (const kd_header *)program;
    misaligned = 0;
    for (uint32_t unit = 0; unit < header->units; ++unit) {
        const kd_nest *nest = kd_find(header, unit);
        kd_pair sum = {0, 0};
        if (nest->kind == KD_TILE)
            sum = tiles(header, nest, unit);
        for (uint32_t lane = 0; nest->kind == KD_WORD && lane < KD_WARP; ++lane) {
            kd_pair one = kd_words(header, nest, unit, lane);
            sum.first = kd_add(sum.first, one.first);
            sum.second = kd_add(sum.second, one.second);
        }
        sums[unit] = sum;
    }
    return misaligned;
}
