/* loops.h on the CPU, for the tests. */
#include <stdint.h>
#include <string.h>

#define KV_FN static inline
#define KV_APART static
#define KV_LANES for (uint32_t lane = 0; lane < 32; ++lane)
#define KV_TOGETHER (void)0
#define KV_UNROLL
#define KV_ROLLED
#define KV_SHARED(pointer) (void)(pointer)
#define KV_FORGET(variable) (void)0
#define KV_FORGET_ADDRESS(variable) (void)0

typedef struct {
    uint64_t low, high;
} kv_word16;
typedef uint64_t kv_word8;
typedef uint32_t kv_word4;
typedef uint16_t kv_word2;
typedef uint8_t kv_word1;

/* Counts accesses whose address is not a multiple of their width: the card would refuse them. */
static uint64_t misaligned;

#define KV_LOAD(TYPE, address)                                                                      \
    (misaligned += (address) % sizeof(TYPE) != 0, kv_load_##TYPE(address))
#define KV_STORE(TYPE, address, value)                                                              \
    do {                                                                                            \
        TYPE kv_value = (value);                                                                    \
        misaligned += (address) % sizeof(TYPE) != 0;                                                \
        memcpy((void *)(uintptr_t)(address), &kv_value, sizeof(TYPE));                              \
    } while (0)
#define KV_LOADER(TYPE)                                                                             \
    static inline TYPE kv_load_##TYPE(uint64_t address)                                             \
    {                                                                                               \
        TYPE value;                                                                                 \
        memcpy(&value, (const void *)(uintptr_t)address, sizeof(TYPE));                             \
        return value;                                                                               \
    }
KV_LOADER(kv_word16)
KV_LOADER(kv_word8)
KV_LOADER(kv_word4)
KV_LOADER(kv_word2)
KV_LOADER(kv_word1)

#include "loops.h"

/* Carries a program out; returns how many accesses were misaligned. */
uint64_t kvferry_carry_out(const void *program)
{
    const kv_header *header = (const kv_header *)program;
    kv_places places;
    _Alignas(16) unsigned char tile[KV_TILE_BYTES];
    misaligned = 0;
    for (uint32_t batch = 0; batch < header->batches; ++batch)
        kv_carry_out(header, batch, &places, tile);
    return misaligned;
}

/* Sizes of the structures, so that the writer of programs can compare. */
void kvferry_sizes(uint64_t sizes[6])
{
    sizes[0] = sizeof(kv_counts);
    sizes[1] = sizeof(kv_header);
    sizes[2] = sizeof(kv_nest);
    sizes[3] = sizeof(kv_dimension);
    sizes[4] = sizeof(kv_pair);
    sizes[5] = sizeof(kv_narrow_pair);
}
