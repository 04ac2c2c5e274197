// Fills memory with values that tell where they are from, and checks where they went.

typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

static __device__ __forceinline__ uint64_t mix(uint64_t seed, uint64_t word)
{
    uint64_t x = (word + seed * 0x9e3779b97f4a7c15ull) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 32)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 29);
}

// Word number i of region number `seed` is mix(seed, i).
extern "C" __global__ void fill(uint64_t *base, uint64_t words, uint64_t seed)
{
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; at < words; at += step)
        base[at] = mix(seed, at);
}

struct Copy {
    uint64_t source, destination, bytes;
};

struct Span {
    uint64_t base, bytes;
};

// Every byte of every copy must be what `fill` wrote where it was read; each is overwritten with the
// poison, so that nothing but poison is left when all is well. Counts wrong bytes.
extern "C" __global__ void check(const Copy *copies, uint64_t count, const Span *regions,
                                 uint32_t region_count, uint8_t poison, uint64_t *wrong)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t warps = (uint64_t)gridDim.x * blockDim.x / 32;
    uint64_t bad = 0;
    for (uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; at < count; at += warps) {
        const Copy copy = copies[at];
        uint32_t region = 0;
        while (region < region_count && copy.source - regions[region].base >= regions[region].bytes)
            ++region;
        const uint64_t offset = copy.source - regions[region].base;
        uint8_t *to = (uint8_t *)copy.destination;
        for (uint64_t byte = lane; byte < copy.bytes; byte += 32) {
            const uint64_t from = offset + byte;
            const uint8_t expected = (uint8_t)(mix(region, from / 8) >> (from % 8 * 8));
            bad += to[byte] != expected;
            to[byte] = poison;
        }
    }
    if (bad)
        atomicAdd(wrong, bad);
}

// Counts bytes that are not poison.
extern "C" __global__ void clean(const uint8_t *base, uint64_t bytes, uint8_t poison, uint64_t *wrong)
{
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    uint64_t bad = 0;
    for (uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; at < bytes; at += step)
        bad += base[at] != poison;
    if (bad)
        atomicAdd(wrong, bad);
}
