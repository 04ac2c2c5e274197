/*
 * Stands in for NVRTC: what it "compiles" says for which CUDA it is, -DCUDA=n, and driver.c has the kernels built in.
 */
#include <stdio.h>

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
    (void)program, (void)options, (void)given;
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
