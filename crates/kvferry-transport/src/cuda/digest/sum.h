/*
 * Adds up the words of a program of a digest, as encode.rs writes it. See kvferry-digest for what the
 * numbers mean.
 *
 * This one text is the body of the kernel (sum.cu) and, compiled by a C compiler (host.c), a function on
 * the CPU. There is no talk between lanes in it: each answers with a sum of its own.
 *
 * A lane has a place in an entry, a column, and goes down the entries: what it reads is multiplied by the
 * entry's factor, which all lanes of a warp share, and only at the end by the weights of the column. A
 * factor is three pieces of 21 bits at most, twice, so that products with words have 53 bits, and two
 * thousand of them can be added up in 64. Where an entry has few columns, a warp takes several entries at
 * once.
 *
 * A card's memory answers after a microsecond: a lane keeps KD_DEPTH loads on their way, and asks for the
 * next as soon as it has taken one.
 *
 * The including file gives: KD_FN, KD_HIGH(a, b) (the upper half of a product), KD_WORDS(address, words)
 * (16 bytes as four words), KD_BYTE(address), KD_UNROLL, KD_ALIGNED (to 16 bytes).
 */

enum { KD_WARP = 32, KD_PIECES = 6, KD_DEPTH = 4 };
/* What a column is: four words of a run, or one word of an element, byte by byte. */
enum { KD_FOUR = 0, KD_ONE = 1 };

#define KD_PRIME ((1ull << 61) - 1)

typedef struct {
    uint64_t first, second;
} kd_pair;

/* An entry: its factor, in pieces, and where it starts, from the start of the nest on. */
typedef struct KD_ALIGNED {
    uint32_t pieces[KD_PIECES];
    uint64_t offset;
} kd_entry;

typedef struct {
    uint64_t stride;
    uint32_t count, keys; /* keys: index of the first */
} kd_level;

typedef struct {
    uint64_t start;  /* address of the first byte of block 0 */
    uint64_t stride; /* from one element of a run to the next, where they do not touch */
    uint32_t first_unit;
    uint32_t kind;
    uint32_t columns, per_run; /* columns of an entry, and of a run */
    uint32_t groups;           /* of 32 columns */
    uint32_t entries, chunk;   /* a unit takes `chunk` entries of a group */
    uint32_t at_once;          /* entries that a warp takes at once: more than one of few columns */
    uint32_t first_entry;      /* index of the first */
    uint32_t weights;          /* index of the first word's weight */
    uint32_t first_level, levels;
    uint32_t bytes, shift, per_element; /* KD_ONE: of an element; words that it may touch */
    uint32_t unused;
} kd_nest;

/* At the start of a program: how many of each, and at which byte they start. */
typedef struct {
    uint32_t nests, units;
    uint32_t levels, pairs, entries, unused;
} kd_header;

KD_FN const void *kd_at(const kd_header *program, uint32_t byte)
{
    return (const unsigned char *)program + byte;
}

KD_FN uint64_t kd_below(uint64_t sum)
{
    sum = (sum & KD_PRIME) + (sum >> 61);
    return sum >= KD_PRIME ? sum - KD_PRIME : sum;
}

KD_FN uint64_t kd_add(uint64_t a, uint64_t b)
{
    return kd_below(a + b);
}

/* Of numbers below the prime. */
KD_FN uint64_t kd_multiply(uint64_t a, uint64_t b)
{
    uint64_t low = a * b, high = KD_HIGH(a, b);
    return kd_below((low & KD_PRIME) + (low >> 61 | high << 3));
}

/* The number that three sums of pieces stand for. */
KD_FN uint64_t kd_whole(uint64_t first, uint64_t second, uint64_t third)
{
    first = (first & KD_PRIME) + (first >> 61);
    second = (second << 21 & KD_PRIME) + (second >> 40);
    third = (third << 42 & KD_PRIME) + (third >> 19);
    return kd_below(first + second + third);
}

KD_FN const kd_nest *kd_find(const kd_header *program, uint32_t unit)
{
    const kd_nest *nests = (const kd_nest *)(program + 1);
    uint32_t low = 0, high = program->nests;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (nests[middle].first_unit <= unit)
            low = middle;
        else
            high = middle;
    }
    return nests + low;
}

/* A word times its weight, added to a sum. */
KD_FN void kd_weigh(kd_pair *sum, const uint64_t pieces[KD_PIECES], const kd_pair *weight)
{
    uint64_t first = kd_whole(pieces[0], pieces[1], pieces[2]);
    uint64_t second = kd_whole(pieces[3], pieces[4], pieces[5]);
    sum->first = kd_add(sum->first, kd_multiply(first, weight->first));
    sum->second = kd_add(sum->second, kd_multiply(second, weight->second));
}

/* What one lane adds up of a unit. */
KD_FN kd_pair kd_lane(const kd_header *program, uint32_t unit, uint32_t lane)
{
    const kd_nest *nest = kd_find(program, unit);
    const kd_pair *pairs = (const kd_pair *)kd_at(program, program->pairs);
    const kd_entry *entries = (const kd_entry *)kd_at(program, program->entries) + nest->first_entry;
    const kd_level *levels = (const kd_level *)kd_at(program, program->levels) + nest->first_level;
    uint32_t within = unit - nest->first_unit;
    uint32_t column = within % nest->groups * KD_WARP + lane;
    uint32_t from = within / nest->groups * nest->chunk;
    uint32_t to = from + nest->chunk < nest->entries ? from + nest->chunk : nest->entries;
    const uint32_t step = nest->at_once;
    kd_pair sum = {0, 0};
    if (step > 1) {
        from += lane / nest->columns;
        if (lane / nest->columns >= step)
            return sum;
        column = lane % nest->columns;
    }
    if (column >= nest->columns)
        return sum;
    uint32_t in_run = column % nest->per_run, outer = column / nest->per_run;
    uint64_t address = nest->start;
    kd_pair key = {1, 1};
    for (uint32_t level = nest->levels; level-- > 0;) {
        uint32_t rest = outer / levels[level].count, index = outer - rest * levels[level].count;
        const kd_pair *drawn = pairs + levels[level].keys + index;
        outer = rest;
        address += index * levels[level].stride;
        key.first = kd_multiply(key.first, drawn->first);
        key.second = kd_multiply(key.second, drawn->second);
    }
    if (nest->kind == KD_FOUR) {
        uint64_t sums[4][KD_PIECES] = {{0}};
        uint32_t words[KD_DEPTH][4];
        address += 16ull * in_run;
        KD_UNROLL
        for (uint32_t ahead = 0; ahead < KD_DEPTH; ++ahead)
            if (from + ahead * step < to)
                KD_WORDS(address + entries[from + ahead * step].offset, words[ahead]);
        for (uint32_t round = from; round < to; round += KD_DEPTH * step) {
            KD_UNROLL
            for (uint32_t ahead = 0; ahead < KD_DEPTH; ++ahead) {
                uint32_t at = round + ahead * step, next = at + KD_DEPTH * step;
                if (at >= to)
                    break;
                const kd_entry entry = entries[at];
                KD_UNROLL
                for (uint32_t word = 0; word < 4; ++word) {
                    KD_UNROLL
                    for (uint32_t piece = 0; piece < KD_PIECES; ++piece)
                        sums[word][piece] += (uint64_t)words[ahead][word] * entry.pieces[piece];
                }
                if (next < to)
                    KD_WORDS(address + entries[next].offset, words[ahead]);
            }
        }
        for (uint32_t word = 0; word < 4; ++word)
            kd_weigh(&sum, sums[word], pairs + nest->weights + 4 * in_run + word);
    } else {
        uint64_t sums[KD_PIECES] = {0};
        uint32_t element = in_run / nest->per_element, nth = in_run % nest->per_element;
        uint32_t place = nest->shift + element * nest->bytes;
        uint32_t word = place / 4 + nth;
        uint32_t first = place > 4 * word ? place : 4 * word;
        uint32_t last = place + nest->bytes < 4 * word + 4 ? place + nest->bytes : 4 * word + 4;
        if (first >= last)
            return sum;
        address += element * nest->stride + (first - place);
        for (uint32_t at = from; at < to; at += step) {
            const kd_entry entry = entries[at];
            uint32_t value = 0;
            for (uint32_t byte = first; byte < last; ++byte)
                value |= (uint32_t)KD_BYTE(address + entry.offset + (byte - first)) << 8 * (byte % 4);
            for (uint32_t piece = 0; piece < KD_PIECES; ++piece)
                sums[piece] += (uint64_t)value * entry.pieces[piece];
        }
        kd_weigh(&sum, sums, pairs + nest->weights + word);
    }
    sum.first = kd_multiply(sum.first, key.first);
    sum.second = kd_multiply(sum.second, key.second);
    return sum;
}
