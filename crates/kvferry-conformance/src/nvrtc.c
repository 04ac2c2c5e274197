/*
 * Stands in for NVRTC: what it "compiles" says for which CUDA it is, -DCUDA=n, and driver.c has the kernels built in.
 * Like NVRTC, it must not be at work when the process ends.
 *
 * KVFERRY_TWIN_COMPILES_MS=n   it takes so long
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int at_work;

__attribute__((destructor)) static void end(void)
{
    if (__atomic_load_n(&at_work, __ATOMIC_ACQUIRE))
        abort();
}

int nvrtcVersion(int *major, int *minor)
{
    *major = CUDA;
    *minor = 0;
    return 0;
}

int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names)
{
    static int any;
    (void)source, (void)name, (void)headers, (void)texts, (void)names;
    *program = &any;
    return 0;
}

int nvrtcCompileProgram(void *program, int options, const char *const *given)
{
    const char *takes = getenv("KVFERRY_TWIN_COMPILES_MS");
    (void)program, (void)options, (void)given;
    __atomic_add_fetch(&at_work, 1, __ATOMIC_ACQ_REL);
    if (takes)
        usleep(1000 * atoi(takes));
    __atomic_sub_fetch(&at_work, 1, __ATOMIC_ACQ_REL);
    return 0;
}

int nvrtcGetCUBINSize(void *program, size_t *bytes)
{
    (void)program;
    *bytes = 32;
    return 0;
}

int nvrtcGetCUBIN(void *program, char *code)
{
    (void)program;
    snprintf(code, 32, "code for CUDA %d", CUDA);
    return 0;
}

int nvrtcDestroyProgram(void **program)
{
    *program = NULL;
    return 0;
}
