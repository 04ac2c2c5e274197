/*
 * The stand-in for CUDA's driver of the transports' tests, with the kernels of `kvferry-bench gpu` (those of check.cu
 * fill and check memory; that of step.cu stands for a model), and an NVRTC that compiles nothing.
 *
 * KVFERRY_STAND_IN_FREE=n     so many bytes of its memory are free
 */
#define cuModuleGetFunction twin_function
#define cuLaunchKernelEx twin_launch
#define cuMemGetInfo_v2 twin_memory_info
#include "../../../kvferry-conformance/src/driver.c"
#undef cuModuleGetFunction
#undef cuLaunchKernelEx
#undef cuMemGetInfo_v2

int cuMemGetInfo_v2(size_t *free, size_t *all)
{
    const char *wanted = getenv("KVFERRY_STAND_IN_FREE");
    int code = twin_memory_info(free, all);
    if (wanted)
        *free = *all = strtoull(wanted, NULL, 10);
    return code;
}

/* Numbers of functions that the other driver does not use, since they are no sizes. */
static const char *const names[] = {"fill", "check", "clean", "layer"};
enum { COUNT = sizeof names / sizeof *names };
static char functions[COUNT];

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    for (int at = 0; at < COUNT; ++at) {
        if (!strcmp(name, names[at])) {
            *function = &functions[at];
            return OK;
        }
    }
    return twin_function(function, module, name);
}

static uint64_t mix(uint64_t seed, uint64_t word)
{
    uint64_t x = (word + seed * 0x9e3779b97f4a7c15ull) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 32)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 29);
}

static void fill(uint64_t *base, uint64_t words, uint64_t seed)
{
    for (uint64_t at = 0; at < words; ++at)
        base[at] = mix(seed, at);
}

static void check(const uint64_t (*copies)[3], uint64_t count, const uint64_t (*regions)[2], uint32_t region_count,
                  uint8_t poison, uint64_t *wrong)
{
    for (uint64_t at = 0; at < count; ++at) {
        uint32_t region = 0;
        while (region < region_count && copies[at][0] - regions[region][0] >= regions[region][1])
            ++region;
        uint64_t from = copies[at][0] - regions[region][0];
        uint8_t *to = (uint8_t *)copies[at][1];
        for (uint64_t byte = 0; byte < copies[at][2]; ++byte, ++from) {
            *wrong += to[byte] != (uint8_t)(mix(region, from / 8) >> (from % 8 * 8));
            to[byte] = poison;
        }
    }
}

static void clean(const uint8_t *base, uint64_t bytes, uint8_t poison, uint64_t *wrong)
{
    for (uint64_t at = 0; at < bytes; ++at)
        *wrong += base[at] != poison;
}

int cuLaunchKernelEx(const struct config *config, void *function, void **arguments, void **extra)
{
#define WORD(at) (*(uint64_t *)arguments[at])
#define AT(at) (void *)WORD(at)
    int number = (int)((char *)function - functions);
    if ((char *)function < functions || number >= COUNT)
        return twin_launch(config, function, arguments, extra);
    /* A layer of a model writes nothing that anybody reads. The others are carried out in order, and have ended when the
       call returns: nobody can tell. */
    int code = cuStreamSynchronize(config->stream);
    if (code)
        return code;
    if (number == 0)
        fill(AT(0), WORD(1), WORD(2));
    else if (number == 1)
        check(AT(0), WORD(1), AT(2), *(uint32_t *)arguments[3], *(uint8_t *)arguments[4], AT(5));
    else if (number == 2)
        clean(AT(0), WORD(1), *(uint8_t *)arguments[2], AT(3));
    return OK;
}

int nvrtcVersion(int *major, int *minor)
{
    *major = 13, *minor = 0;
    return 0;
}

int nvrtcCreateProgram(void **program, ...)
{
    *program = functions;
    return 0;
}

int nvrtcCompileProgram(void *program, ...) { return !program; }

int nvrtcGetCUBINSize(void *program, size_t *bytes)
{
    *bytes = 1;
    return !program;
}

int nvrtcGetCUBIN(void *program, char *image)
{
    *image = 0;
    return !program;
}

int nvrtcDestroyProgram(void **program)
{
    *program = NULL;
    return 0;
}
