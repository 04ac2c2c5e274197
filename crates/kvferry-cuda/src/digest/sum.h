/*
 * Adds up the bytes of a program of a digest, as encode.rs writes it. See kvferry-digest for what the
 * numbers mean.
 *
 * This one text is the body of the kernel (sum.cu) and, compiled by a C compiler (host.c), a model of it on
 * the CPU. Lanes of a warp talk to each other only where the including file multiplies tiles.
 *
 * A digest is a sum of words, each times a factor of its entry and a weight of its column. Where runs are
 * whole and aligned, a warp takes a tile at a time: 32 entries of 8 columns, 16 bytes each. The factors of an
 * entry are 16 numbers of 8 bits, so what the words are multiplied by is a matrix of bytes, and the card's
 * matrix units do it: 16 products (one for each byte of a column) of 16 x 32 factors and 32 x 8 bytes. What
 * is left is to load, and to turn bytes so that those of four entries lie side by side. The weights of the
 * columns come in at the end of a unit.
 *
 * Other runs are taken word by word, byte by byte: a lane has a column and goes down the entries. There a
 * factor is three pieces of 21 bits at most, twice, so that products with words have 53 bits, and two
 * thousand of them can be added up in 64.
 *
 * The including file gives: KD_FN, KD_HIGH(a, b) (the upper half of a product), KD_LOAD(address, words)
 * (16 bytes as four words, of what is added up), KD_FETCH(pointer, words) (the same, of the program),
 * KD_PERMUTE(a, b, selector) (four bytes out of eight), KD_BYTE(address), KD_UNROLL, KD_ALIGNED (to 16 bytes).
 */

enum { KD_WARP = 32, KD_PIECES = 6 };
/* What a column is: 16 bytes of a tile, or one word of an element, byte by byte. */
enum { KD_TILE = 0, KD_WORD = 1 };
/* Of a tile. A lane loads eight of its entries. */
enum { KD_ENTRIES = 32, KD_COLUMNS = 8, KD_BYTES = 16, KD_LOADS = 8 };

#define KD_PRIME ((1ull << 61) - 1)

typedef struct {
    uint64_t first, second;
} kd_pair;

/* An entry that is taken by words: its factor, in pieces, and where it starts, from the start of the nest on. */
typedef struct KD_ALIGNED {
    uint32_t pieces[KD_PIECES];
    uint64_t offset;
} kd_entry;

/* The entries of a tile: for every lane its part of the factors, as the matrix units want them; and where each
 * entry starts, in units of 16 bytes. */
typedef struct KD_ALIGNED {
    uint32_t factors[KD_WARP][4];
    uint32_t offsets[KD_ENTRIES];
} kd_batch;

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
    uint32_t groups;           /* of columns that a warp takes at once */
    uint32_t entries, chunk;   /* a unit takes `chunk` entries of a group; of a KD_TILE, batches */
    uint32_t at_once;          /* KD_WORD: entries that a warp takes at once: more than one of few columns */
    uint32_t first_entry;      /* index of the first; of a KD_TILE, of the first batch */
    uint32_t weights;          /* index of the first word's weight */
    uint32_t first_level, levels;
    uint32_t bytes, shift, per_element; /* KD_WORD: of an element; words that it may touch */
    uint32_t unused;
} kd_nest;

/* At the start of a program: how many of each, and at which byte they start. */
typedef struct {
    uint32_t nests, units;
    uint32_t levels, pairs, entries, batches;
} kd_header;

/* A column: where it is, and what all of it is multiplied by. */
typedef struct {
    uint32_t in_run;
    uint64_t address;
    kd_pair key;
} kd_column;

KD_FN const void *kd_at(const kd_header *program, uint32_t byte)
{
    return (const unsigned char *)program + byte;
}

KD_FN const kd_pair *kd_pairs(const kd_header *program)
{
    return (const kd_pair *)kd_at(program, program->pairs);
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

/* A number below the prime times 2^bits, for less than 61 bits. */
KD_FN uint64_t kd_shift(uint64_t number, uint32_t bits)
{
    return kd_below((number << bits & KD_PRIME) + (number >> (61 - bits)));
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

KD_FN kd_column kd_column_of(const kd_header *program, const kd_nest *nest, uint32_t number)
{
    const kd_level *levels = (const kd_level *)kd_at(program, program->levels) + nest->first_level;
    kd_column column = {number % nest->per_run, nest->start, {1, 1}};
    uint32_t outer = number / nest->per_run;
    for (uint32_t level = nest->levels; level-- > 0;) {
        uint32_t rest = outer / levels[level].count, index = outer - rest * levels[level].count;
        const kd_pair *drawn = kd_pairs(program) + levels[level].keys + index;
        outer = rest;
        column.address += index * levels[level].stride;
        column.key.first = kd_multiply(column.key.first, drawn->first);
        column.key.second = kd_multiply(column.key.second, drawn->second);
    }
    return column;
}

/* A lane's part in the tiles of a unit: the column whose bytes it loads, of the entries that start at `quarter`
 * and 16 behind it; and the batches. */
typedef struct {
    uint64_t address; /* 0: there is no such column */
    uint32_t group, quarter;
    uint32_t from, to;
} kd_tiles;

KD_FN kd_tiles kd_tiles_of(const kd_header *program, const kd_nest *nest, uint32_t unit, uint32_t lane)
{
    uint32_t within = unit - nest->first_unit;
    uint32_t group = within % nest->groups, from = within / nest->groups * nest->chunk;
    uint32_t all = (nest->entries + KD_ENTRIES - 1) / KD_ENTRIES, to = from + nest->chunk;
    uint32_t column = group * KD_COLUMNS + lane / 4;
    kd_tiles tiles = {0, group, lane % 4 * 4, nest->first_entry + from,
                      nest->first_entry + (to < all ? to : all)};
    if (column < nest->columns) {
        kd_column of = kd_column_of(program, nest, column);
        tiles.address = of.address + 16ull * of.in_run;
    }
    return tiles;
}

/* Where the eight entries of a lane start. */
KD_FN void kd_offsets(const kd_batch *batch, uint32_t quarter, uint32_t offsets[KD_LOADS])
{
    KD_FETCH(batch->offsets + quarter, offsets);
    KD_FETCH(batch->offsets + KD_ENTRIES / 2 + quarter, offsets + 4);
}

/* Loads a column of eight entries. */
KD_FN void kd_load(uint64_t address, const uint32_t offsets[KD_LOADS], uint32_t words[KD_LOADS][4])
{
    KD_UNROLL
    for (uint32_t load = 0; load < KD_LOADS; ++load) {
        if (address != 0) {
            KD_LOAD(address + 16ull * offsets[load], words[load]);
        } else {
            KD_UNROLL
            for (uint32_t word = 0; word < 4; ++word)
                words[load][word] = 0;
        }
    }
}

/* Turns what was loaded: the word of byte n of four entries, twice. */
KD_FN void kd_turn(const uint32_t words[KD_LOADS][4], uint32_t turned[KD_BYTES][2])
{
    KD_UNROLL
    for (uint32_t word = 0; word < 4; ++word) {
        KD_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t a = words[4 * half][word], b = words[4 * half + 1][word];
            const uint32_t c = words[4 * half + 2][word], d = words[4 * half + 3][word];
            const uint32_t low = KD_PERMUTE(a, b, 0x5140), below = KD_PERMUTE(c, d, 0x5140);
            const uint32_t high = KD_PERMUTE(a, b, 0x7362), above = KD_PERMUTE(c, d, 0x7362);
            turned[4 * word][half] = KD_PERMUTE(low, below, 0x5410);
            turned[4 * word + 1][half] = KD_PERMUTE(low, below, 0x7632);
            turned[4 * word + 2][half] = KD_PERMUTE(high, above, 0x5410);
            turned[4 * word + 3][half] = KD_PERMUTE(high, above, 0x7632);
        }
    }
}

/* What a lane's part of the products stands for: of two columns, the sums of each byte with the eighth that
 * this lane has of the first factor, and of the second. */
KD_FN kd_pair kd_weigh(const kd_header *program, const kd_nest *nest, const kd_tiles *tiles, uint32_t lane,
                       const int32_t products[KD_BYTES][4])
{
    kd_pair sum = {0, 0};
    KD_UNROLL
    for (uint32_t side = 0; side < 2; ++side) {
        uint32_t number = tiles->group * KD_COLUMNS + lane % 4 * 2 + side;
        kd_pair of = {0, 0};
        if (number >= nest->columns)
            continue;
        kd_column column = kd_column_of(program, nest, number);
        const kd_pair *weights = kd_pairs(program) + nest->weights + 4 * column.in_run;
        KD_UNROLL
        for (uint32_t word = 0; word < 4; ++word) {
            uint64_t first = 0, second = 0;
            KD_UNROLL
            for (uint32_t byte = 0; byte < 4; ++byte) {
                first += (uint64_t)products[4 * word + byte][side] << 8 * byte;
                second += (uint64_t)products[4 * word + byte][2 + side] << 8 * byte;
            }
            of.first = kd_add(of.first, kd_multiply(first, weights[word].first));
            of.second = kd_add(of.second, kd_multiply(second, weights[word].second));
        }
        sum.first = kd_add(sum.first, kd_multiply(of.first, column.key.first));
        sum.second = kd_add(sum.second, kd_multiply(of.second, column.key.second));
    }
    sum.first = kd_shift(sum.first, lane / 4 * 8);
    sum.second = kd_shift(sum.second, lane / 4 * 8);
    return sum;
}

/* What one lane adds up of a unit, word by word. */
KD_FN kd_pair kd_words(const kd_header *program, const kd_nest *nest, uint32_t unit, uint32_t lane)
{
    const kd_entry *entries = (const kd_entry *)kd_at(program, program->entries) + nest->first_entry;
    uint32_t within = unit - nest->first_unit;
    uint32_t number = within % nest->groups * KD_WARP + lane;
    uint32_t from = within / nest->groups * nest->chunk;
    uint32_t to = from + nest->chunk < nest->entries ? from + nest->chunk : nest->entries;
    const uint32_t step = nest->at_once;
    kd_pair sum = {0, 0};
    if (step > 1) {
        from += lane / nest->columns;
        if (lane / nest->columns >= step)
            return sum;
        number = lane % nest->columns;
    }
    if (number >= nest->columns)
        return sum;
    kd_column column = kd_column_of(program, nest, number);
    uint64_t sums[KD_PIECES] = {0};
    uint32_t element = column.in_run / nest->per_element, nth = column.in_run % nest->per_element;
    uint32_t place = nest->shift + element * nest->bytes;
    uint32_t word = place / 4 + nth;
    uint32_t first = place > 4 * word ? place : 4 * word;
    uint32_t last = place + nest->bytes < 4 * word + 4 ? place + nest->bytes : 4 * word + 4;
    if (first >= last)
        return sum;
    uint64_t address = column.address + element * nest->stride + (first - place);
    for (uint32_t at = from; at < to; at += step) {
        const kd_entry entry = entries[at];
        uint32_t value = 0;
        for (uint32_t byte = first; byte < last; ++byte)
            value |= (uint32_t)KD_BYTE(address + entry.offset + (byte - first)) << 8 * (byte % 4);
        for (uint32_t piece = 0; piece < KD_PIECES; ++piece)
            sums[piece] += (uint64_t)value * entry.pieces[piece];
    }
    const kd_pair *weight = kd_pairs(program) + nest->weights + word;
    sum.first = kd_multiply(kd_whole(sums[0], sums[1], sums[2]), weight->first);
    sum.second = kd_multiply(kd_whole(sums[3], sums[4], sums[5]), weight->second);
    sum.first = kd_multiply(sum.first, column.key.first);
    sum.second = kd_multiply(sum.second, column.key.second);
    return sum;
}
