/*
 * Carries out a program: nests of loops over tables of blocks, as program.rs writes them.
 *
 * This one text is the body of the kernel (copy.cu) and, compiled by a C compiler, a function on the
 * CPU: so the tests judge here, without a GPU, what runs on the card. A warp is 32 lanes in step. What
 * lanes do is written inside KV_LANES, which is "this lane" on the card and a loop over all of them on
 * the CPU; after it, KV_TOGETHER makes what lanes wrote visible to the others.
 *
 * The including file gives: KV_FN, KV_APART (a function that is not inlined), KV_LANES (declares
 * `lane`), KV_TOGETHER, KV_UNROLL, KV_ROLLED, KV_FORGET(variable), KV_FORGET_ADDRESS(variable),
 * KV_SHARED(pointer to shared memory), the types kv_word1 .. kv_word16, KV_LOAD(type, address) and
 * KV_STORE(type, address, value).
 */

/* Loads of a lane that are on their way at a time. */
#define KV_DEEP 8
enum { KV_WARP = 32, KV_CHUNK_WORDS = KV_WARP * KV_DEEP, KV_TILE_BYTES = 2176 };

/* What an item of a nest is: what one lane works out the place of, and a warp moves. */
enum {
    KV_RUN = 0,   /* a run of at most KV_CHUNK_WORDS words */
    KV_CHUNK = 1, /* KV_CHUNK_WORDS words of a longer run, or of short ones that are evenly apart (rows);
                     dimension 0 counts chunks */
    KV_TILE = 2   /* a tile of single words that lie across; dimensions 0 and 1 count tiles */
};

/* n / divisor for n below 2^31. */
typedef struct {
    uint32_t divisor, magic, shift, unused;
} kv_divisor;

/* One dimension of a nest's items, the innermost first. */
typedef struct {
    uint64_t source, destination;
    kv_divisor count;
} kv_dimension;

typedef struct {
    uint64_t source, destination;             /* of block 0 */
    uint64_t source_block, destination_block; /* bytes from one block to the next */
    uint64_t source_row, destination_row;     /* of a tile or chunk: bytes from one row to the next */
    uint32_t items, batch;                    /* a warp takes `batch` items at a time */
    uint32_t first_batch;                     /* number of its first batch */
    uint32_t kind, width;                     /* width: bytes of a word */
    uint32_t first_dimension, dimensions;
    uint32_t pair_dimension; /* which dimension counts pairs of blocks */
    uint32_t first_pair;
    uint32_t across, along; /* a tile nest: words in a row on the source, on the destination;
                               chunks: words of all rows, logarithm of the words in a row */
    uint32_t pitch;         /* words from one row of a tile to the next in shared memory */
    kv_divisor words;       /* of a run or a chunk's row; of a tile: in a row on the source */
    kv_divisor tile;        /* of a tile: in a row on the destination */
} kv_nest;

typedef struct {
    uint32_t source, destination;
} kv_pair;

/* The same where all numbers of a program are below 2^16. */
typedef struct {
    uint16_t source, destination;
} kv_narrow_pair;

/* Counts of one launch, in the card's memory; all zero before and after. */
typedef struct {
    uint32_t dealt; /* batches, after the first of each warp */
    uint32_t unused[31];
    uint32_t ended; /* CTAs */
} kv_counts;

/* At the start of a program; then nests, dimensions and pairs. */
typedef struct {
    uint32_t nests, dimensions, batches;
    uint32_t narrow; /* whether pairs are narrow */
    uint64_t counts; /* of this launch */
    uint64_t signal; /* a word of the host's memory that becomes 1 when everything is in place */
} kv_header;

/* A warp's own part of shared memory. */
typedef struct {
    uint64_t source[KV_WARP], destination[KV_WARP];
    uint32_t first[KV_WARP], second[KV_WARP];
} kv_places;

KV_FN uint32_t kv_divide(uint32_t number, const kv_divisor *by)
{
    return (uint32_t)(((uint64_t)(number << 1) * by->magic) >> 32) >> by->shift;
}

KV_FN uint32_t kv_least(uint32_t one, uint32_t other)
{
    return one < other ? one : other;
}

KV_FN const kv_nest *kv_nests(const kv_header *program)
{
    return (const kv_nest *)(program + 1);
}

KV_FN const kv_dimension *kv_dimensions(const kv_header *program)
{
    return (const kv_dimension *)(kv_nests(program) + program->nests);
}

KV_FN kv_pair kv_pair_at(const kv_header *program, uint32_t index)
{
    const void *pairs = kv_dimensions(program) + program->dimensions;
    if (!program->narrow)
        return ((const kv_pair *)pairs)[index];
    const kv_narrow_pair narrow = ((const kv_narrow_pair *)pairs)[index];
    const kv_pair pair = {narrow.source, narrow.destination};
    return pair;
}

/* The nest that a batch belongs to. */
KV_FN const kv_nest *kv_find(const kv_header *program, uint32_t batch)
{
    const kv_nest *nests = kv_nests(program);
    uint32_t low = 0, high = program->nests;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (nests[middle].first_batch <= batch)
            low = middle;
        else
            high = middle;
    }
    return nests + low;
}

/* Where an item starts on both sides, and its indices in the two innermost dimensions. */
KV_FN void kv_locate(const kv_header *program, const kv_nest *nest, uint32_t item, uint32_t slot,
                     kv_places *places)
{
    const kv_dimension *dimensions = kv_dimensions(program) + nest->first_dimension;
    uint64_t source = nest->source, destination = nest->destination;
    uint32_t first = 0, second = 0;
    for (uint32_t number = 0; number < nest->dimensions; ++number) {
        const kv_dimension *dimension = dimensions + number;
        uint32_t rest = kv_divide(item, &dimension->count);
        uint32_t index = item - rest * dimension->count.divisor;
        item = rest;
        if (number == nest->pair_dimension) {
            kv_pair pair = kv_pair_at(program, nest->first_pair + index);
            source += pair.source * nest->source_block;
            destination += pair.destination * nest->destination_block;
        } else {
            source += index * dimension->source;
            destination += index * dimension->destination;
        }
        if (number == 0)
            first = index;
        if (number == 1)
            second = index;
    }
    places->source[slot] = source;
    places->destination[slot] = destination;
    places->first[slot] = first;
    places->second[slot] = second;
}

/*
 * The three ways to move items, for words of one width.
 *
 * Runs: the words of all items in a row, dealt out to the lanes; KV_DEEP loads of a lane are on their
 * way at a time. Tiles: read in the source's order into shared memory, written
 * in the destination's order from there. KV_FORGET makes the compiler work addresses out again for the
 * stores instead of keeping them in registers that the loads need. Where fewer words are left than lanes
 * could take, the spare lanes move the last word once more, to the same place: cheaper than a branch.
 */
#define KV_MOVERS(WORD)                                                                             \
    KV_APART void kv_move_runs_##WORD(const kv_nest *nest, const kv_places *places, uint32_t items) \
    {                                                                                               \
        const kv_divisor words = nest->words;                                                       \
        const uint32_t total = items * words.divisor;                                               \
        KV_SHARED(places);                                                                          \
        KV_LANES                                                                                    \
        {                                                                                           \
            KV_ROLLED                                                                               \
            for (uint32_t from = lane; from < total; from += KV_WARP * KV_DEEP) {                   \
                WORD values[KV_DEEP];                                                               \
                KV_UNROLL                                                                           \
                for (uint32_t deep = 0; deep < KV_DEEP; ++deep) {                                   \
                    uint32_t word = kv_least(from + deep * KV_WARP, total - 1);                     \
                    uint32_t item = kv_divide(word, &words);                                        \
                    uint32_t within = (word - item * words.divisor) * (uint32_t)sizeof(WORD);       \
                    values[deep] = KV_LOAD(WORD, places->source[item] + within);                    \
                }                                                                                   \
                uint32_t again = from;                                                              \
                KV_FORGET(again);                                                                   \
                KV_UNROLL                                                                           \
                for (uint32_t deep = 0; deep < KV_DEEP; ++deep) {                                   \
                    uint32_t word = kv_least(again + deep * KV_WARP, total - 1);                    \
                    uint32_t item = kv_divide(word, &words);                                        \
                    uint32_t within = (word - item * words.divisor) * (uint32_t)sizeof(WORD);       \
                    KV_STORE(WORD, places->destination[item] + within, values[deep]);               \
                }                                                                                   \
            }                                                                                       \
        }                                                                                           \
        KV_TOGETHER;                                                                                \
    }

/*
 * Chunks: item after item. A chunk's rows are of 32 * STEPS words, and each lane moves the same word of
 * every 32; or of fewer, and each lane moves the same word of every row that is its turn: where a lane's
 * words lie follows from where the first one lies.
 */
#define KV_STEP(address, bytes, now)                                                                \
    do {                                                                                            \
        if (now) {                                                                                  \
            address += bytes;                                                                       \
            KV_FORGET_ADDRESS(address);                                                             \
        }                                                                                           \
    } while (0)
#define KV_CHUNK_MOVER(HOW, WORD, STEPS)                                                            \
    /* What a lane does for a chunk that is not full: its first word is `left` before the end. */   \
    KV_APART void kv_move_part_##STEPS##_##WORD(uint64_t source, uint64_t destination,              \
                                                uint64_t source_row, uint64_t destination_row,      \
                                                int32_t left)                                       \
    {                                                                                               \
        WORD values[KV_DEEP] = {0};                                                           \
        KV_UNROLL                                                                                   \
        for (int32_t deep = 0; deep < KV_DEEP; ++deep) {                                      \
            if (deep * KV_WARP < left)                                                              \
                values[deep] = KV_LOAD(WORD, source + deep % STEPS * KV_WARP * sizeof(WORD));       \
            KV_STEP(source, source_row, deep % STEPS == STEPS - 1);                                 \
        }                                                                                           \
        KV_UNROLL                                                                                   \
        for (int32_t deep = 0; deep < KV_DEEP; ++deep) {                                      \
            if (deep * KV_WARP < left)                                                              \
                KV_STORE(WORD, destination + deep % STEPS * KV_WARP * sizeof(WORD), values[deep]);  \
            KV_STEP(destination, destination_row, deep % STEPS == STEPS - 1);                       \
        }                                                                                           \
    }                                                                                               \
                                                                                                    \
    HOW void kv_move_chunks_##STEPS##_##WORD(const kv_nest *nest, const kv_places *places,          \
                                             uint32_t items)                                        \
    {                                                                                               \
        const uint32_t bits = kv_least(nest->along, 5), total = nest->across;                       \
        const uint64_t source_row = nest->source_row << (5 - bits);                                 \
        const uint64_t destination_row = nest->destination_row << (5 - bits);                       \
        KV_SHARED(places);                                                                          \
        KV_LANES                                                                                    \
        {                                                                                           \
            const uint32_t row = lane >> bits;                                                      \
            const uint32_t column = (lane & ((1u << bits) - 1)) * (uint32_t)sizeof(WORD);           \
            const uint64_t from_start = row * nest->source_row + column;                            \
            const uint64_t to_start = row * nest->destination_row + column;                         \
            KV_ROLLED                                                                               \
            for (uint32_t item = 0; item < items; ++item) {                                         \
                const uint32_t left = total - places->first[item] * KV_CHUNK_WORDS;                 \
                uint64_t source = places->source[item] + from_start;                                \
                uint64_t destination = places->destination[item] + to_start;                        \
                if (left < KV_CHUNK_WORDS) {                                                        \
                    kv_move_part_##STEPS##_##WORD(source, destination, source_row, destination_row, \
                                                  (int32_t)(left - lane));                          \
                    continue;                                                                       \
                }                                                                                   \
                WORD values[KV_DEEP];                                                         \
                KV_UNROLL                                                                           \
                for (uint32_t deep = 0; deep < KV_DEEP; ++deep) {                             \
                    values[deep] = KV_LOAD(WORD, source + deep % STEPS * KV_WARP * sizeof(WORD));   \
                    KV_STEP(source, source_row, deep % STEPS == STEPS - 1);                         \
                }                                                                                   \
                KV_UNROLL                                                                           \
                for (uint32_t deep = 0; deep < KV_DEEP; ++deep) {                             \
                    KV_STORE(WORD, destination + deep % STEPS * KV_WARP * sizeof(WORD),             \
                             values[deep]);                                                         \
                    KV_STEP(destination, destination_row, deep % STEPS == STEPS - 1);               \
                }                                                                                   \
            }                                                                                       \
        }                                                                                           \
        KV_TOGETHER;                                                                                \
    }

#define KV_TILE_MOVER(WORD)                                                                         \
    KV_APART void kv_move_tiles_##WORD(const kv_nest *nest, const kv_places *places, uint32_t items, \
                                    void *shared)                                                   \
    {                                                                                               \
        WORD *tile = (WORD *)shared;                                                                \
        const kv_divisor across = nest->words, along = nest->tile;                                  \
        const uint32_t total = across.divisor * along.divisor, pitch = nest->pitch;                 \
        KV_SHARED(places);                                                                          \
        KV_SHARED(tile);                                                                            \
        KV_ROLLED                                                                                   \
        for (uint32_t item = 0; item < items; ++item) {                                             \
            const uint64_t source = places->source[item], destination = places->destination[item];  \
            const uint32_t columns = nest->across - places->first[item] * across.divisor;           \
            const uint32_t rows = nest->along - places->second[item] * along.divisor;               \
            KV_LANES                                                                                \
            {                                                                                       \
                const uint64_t source_row = nest->source_row;                                       \
                KV_ROLLED                                                                           \
                for (uint32_t from = lane; from < total; from += KV_WARP * KV_DEEP) {               \
                    WORD values[KV_DEEP];                                                           \
                    KV_UNROLL                                                                       \
                    for (uint32_t deep = 0; deep < KV_DEEP; ++deep) {                               \
                        uint32_t word = from + deep * KV_WARP, row = kv_divide(word, &across);      \
                        uint32_t column = word - row * across.divisor;                              \
                        if (word < total && row < rows && column < columns)                         \
                            values[deep] =                                                          \
                                KV_LOAD(WORD, source + row * source_row + column * sizeof(WORD));   \
                    }                                                                               \
                    KV_UNROLL                                                                       \
                    for (uint32_t deep = 0; deep < KV_DEEP; ++deep) {                               \
                        uint32_t word = from + deep * KV_WARP, row = kv_divide(word, &across);      \
                        uint32_t column = word - row * across.divisor;                              \
                        if (word < total && row < rows && column < columns)                         \
                            tile[row * pitch + column] = values[deep];                              \
                    }                                                                               \
                }                                                                                   \
            }                                                                                       \
            KV_TOGETHER;                                                                            \
            KV_LANES                                                                                \
            {                                                                                       \
                const uint64_t destination_row = nest->destination_row;                             \
                KV_ROLLED                                                                           \
                for (uint32_t word = lane; word < total; word += KV_WARP) {                         \
                    uint32_t column = kv_divide(word, &along);                                      \
                    uint32_t row = word - column * along.divisor;                                   \
                    if (row < rows && column < columns)                                             \
                        KV_STORE(WORD,                                                              \
                                 destination + column * destination_row + row * sizeof(WORD),       \
                                 tile[row * pitch + column]);                                       \
                }                                                                                   \
            }                                                                                       \
            KV_TOGETHER;                                                                            \
        }                                                                                           \
    }

KV_MOVERS(kv_word16)
KV_MOVERS(kv_word8)
KV_MOVERS(kv_word4)
KV_MOVERS(kv_word2)
KV_MOVERS(kv_word1)
/* Most bytes move through these. */
KV_CHUNK_MOVER(KV_FN, kv_word16, 1)
KV_CHUNK_MOVER(KV_FN, kv_word16, 2)
KV_CHUNK_MOVER(KV_FN, kv_word16, 4)
KV_CHUNK_MOVER(KV_FN, kv_word16, 8)
KV_CHUNK_MOVER(KV_APART, kv_word8, 8)
KV_CHUNK_MOVER(KV_APART, kv_word4, 8)
KV_CHUNK_MOVER(KV_APART, kv_word2, 8)
KV_CHUNK_MOVER(KV_APART, kv_word1, 8)
KV_TILE_MOVER(kv_word8)
KV_TILE_MOVER(kv_word4)
KV_TILE_MOVER(kv_word2)
KV_TILE_MOVER(kv_word1)

/* What a warp does with one batch. `tile` is KV_TILE_BYTES of memory of its own. */
KV_FN void kv_carry_out(const kv_header *program, uint32_t batch, kv_places *places, void *tile)
{
    const kv_nest *nest = kv_find(program, batch);
    const uint32_t first = (batch - nest->first_batch) * nest->batch;
    const uint32_t left = nest->items - first;
    const uint32_t items = left < nest->batch ? left : nest->batch;
    KV_LANES
    {
        if (lane < items)
            kv_locate(program, nest, first + lane, lane, places);
    }
    KV_TOGETHER;
    if (nest->kind == KV_CHUNK && nest->width == 16) {
        if (nest->along <= 5)
            kv_move_chunks_1_kv_word16(nest, places, items);
        else if (nest->along == 6)
            kv_move_chunks_2_kv_word16(nest, places, items);
        else if (nest->along == 7)
            kv_move_chunks_4_kv_word16(nest, places, items);
        else
            kv_move_chunks_8_kv_word16(nest, places, items);
        return;
    }
#define KV_RUN_CASE(WIDTH)                                                                          \
    case KV_RUN * 32 + WIDTH:                                                                       \
        kv_move_runs_kv_word##WIDTH(nest, places, items);                                           \
        break;
#define KV_CHUNK_CASE(WIDTH)                                                                        \
    case KV_CHUNK * 32 + WIDTH:                                                                     \
        kv_move_chunks_8_kv_word##WIDTH(nest, places, items);                                       \
        break;
#define KV_TILE_CASE(WIDTH)                                                                         \
    case KV_TILE * 32 + WIDTH:                                                                      \
        kv_move_tiles_kv_word##WIDTH(nest, places, items, tile);                                    \
        break;
    switch (nest->kind * 32 + nest->width) {
        KV_RUN_CASE(16)
        KV_RUN_CASE(8)
        KV_CHUNK_CASE(8)
        KV_RUN_CASE(4)
        KV_CHUNK_CASE(4)
        KV_RUN_CASE(2)
        KV_CHUNK_CASE(2)
        KV_RUN_CASE(1)
        KV_CHUNK_CASE(1)
        KV_TILE_CASE(8)
        KV_TILE_CASE(4)
        KV_TILE_CASE(2)
        KV_TILE_CASE(1)
    }
#undef KV_RUN_CASE
#undef KV_CHUNK_CASE
#undef KV_TILE_CASE
}
