/* sum.h on the CPU, for the tests. */
#include <stdint.h>
#include <string.h>

#define KD_FN static inline
#define KD_HIGH(a, b) ((uint64_t)((unsigned __int128)(a) * (b) >> 64))
#define KD_UNROLL
#define KD_ALIGNED

/* Counts accesses whose address is not a multiple of their width: the card would refuse them. */
static uint64_t misaligned;

#define KD_WORDS(address, words)                                                                    \
    do {                                                                                            \
        uint64_t kd_address = (address);                                                            \
        misaligned += kd_address % 16 != 0;                                                         \
        memcpy(words, (const void *)(uintptr_t)kd_address, 16);                                     \
    } while (0)
#define KD_BYTE(address) (*(const uint8_t *)(uintptr_t)(address))

#include "sum.h"

/* Adds up all units; returns how many accesses were misaligned. */
uint64_t kvferry_digest(const void *program, kd_pair *sums)
{
    const kd_header *header = (const kd_header *)program;
    misaligned = 0;
    for (uint32_t unit = 0; unit < header->units; ++unit) {
        kd_pair sum = {0, 0};
        for (uint32_t lane = 0; lane < KD_WARP; ++lane) {
            kd_pair one = kd_lane(header, unit, lane);
            sum.first = kd_add(sum.first, one.first);
            sum.second = kd_add(sum.second, one.second);
        }
        sums[unit] = sum;
    }
    return misaligned;
}
