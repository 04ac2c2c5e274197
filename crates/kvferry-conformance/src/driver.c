/*
 * Enough of CUDA's driver to run the cuda back end without a GPU: memory that other processes can open,
 * streams that work in order in threads of their own, and one kernel, whose body is loops.h. A kernel that may
 * overlap the one before it runs first if both are queued; it is refused where what comes before it fills
 * memory. What a card does is done by the CPU; everything around it is the back end's own code.
 *
 * KVFERRY_TWIN_REFUSES=open   memory of other processes cannot be opened, as in other containers and under MIG
 * KVFERRY_TWIN_REFUSES=launch kernels do not start
 * KVFERRY_TWIN_REFUSES=next   nor do those that find another one under way
 * KVFERRY_TWIN_REFUSES=run    kernels start, and end with an error
 * KVFERRY_TWIN_REFUSES=module kernels cannot be loaded
 * KVFERRY_TWIN_REFUSES=name   they have other names
 * KVFERRY_TWIN_REFUSES=memory there is no memory left, on the card or pinned
 * KVFERRY_TWIN_REFUSES=pinned there is none of the host's to be pinned
 * KVFERRY_TWIN_CUDA=n         the newest CUDA that it knows, 13 without; it loads no code that nvrtc.c made for a newer one
 * KVFERRY_TWIN_LATE_MS=n      kernels and copies wait so long before they move anything
 * KVFERRY_TWIN_GATE=path      they wait as long as there is such a file, and make path.knock when they do
 * KVFERRY_TWIN_ONCE=what n    the next question after work is answered with the code n; what: stream (cuStreamQuery),
 *                             wait (cuStreamSynchronize), event (cuEventQuery), context (cuCtxSetCurrent while a
 *                             kernel is under way)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host.c"

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, UNSUPPORTED = 222, NOT_FOUND = 500, NOT_READY = 600, BROKEN = 700 };
enum { NOT_PERMITTED = 800, NOT_SUPPORTED = 801 };

/* Says that this is not CUDA, and that its cards' memory is the host's. */
const int kvferry_stand_in = 1;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int refuses(const char *what)
{
    const char *refused = getenv("KVFERRY_TWIN_REFUSES");
    return refused && !strcmp(refused, what);
}

/* The code to answer with, if this is the question that is to be answered so, and was not yet. */
static int once(const char *what)
{
    static char said[32];
    char name[16];
    int code = OK;
    const char *wanted = getenv("KVFERRY_TWIN_ONCE");
    if (!wanted || sscanf(wanted, "%15s %d", name, &code) != 2 || strcmp(name, what))
        return OK;
    pthread_mutex_lock(&lock);
    if (strncmp(said, wanted, sizeof said - 1))
        strncpy(said, wanted, sizeof said - 1);
    else
        code = OK;
    pthread_mutex_unlock(&lock);
    return code;
}

/* Memory "on the card": a file without a name, which other processes open through this one. */
struct span {
    uint64_t base, bytes;
    int file; /* -1 where it is another process's, or mapped */
    uint64_t serial; /* no other allocation of this process has it */
    struct allocation *mapped; /* where it is from the virtual-memory interface */
    struct span *next;
};
static struct span *spans;

/* As a card does, addresses that were given back last are given out first. */
static void *freed;

static struct span *find(uint64_t address)
{
    struct span *span = spans;
    while (span && address - span->base >= span->bytes)
        span = span->next;
    return span;
}

static void link_in(struct span *span)
{
    pthread_mutex_lock(&lock);
    span->next = spans;
    spans = span;
    pthread_mutex_unlock(&lock);
}

static struct span *link_out(uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct span **at = &spans, *span;
    while (*at && (*at)->base != address)
        at = &(*at)->next;
    if ((span = *at))
        *at = span->next;
    pthread_mutex_unlock(&lock);
    return span;
}

static int add(uint64_t *address, uint64_t bytes, int file, int keep)
{
    static uint64_t serial;
    void *memory = mmap(freed, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return NO_MEMORY;
    struct span *span = malloc(sizeof *span);
    *span = (struct span){.base = (uint64_t)memory, .bytes = bytes, .file = keep ? file : -1};
    span->serial = __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED);
    link_in(span);
    *address = span->base;
    return OK;
}

static int take_away(uint64_t address)
{
    struct span *span = link_out(address);
    if (!span)
        return INVALID;
    munmap((void *)span->base, span->bytes);
    freed = (void *)span->base;
    if (span->file >= 0)
        close(span->file);
    free(span);
    return OK;
}

int cuMemGetInfo_v2(size_t *free, size_t *all)
{
    *free = *all = (size_t)1 << 30;
    return OK;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    if (refuses("memory"))
        return NO_MEMORY;
    int file = memfd_create("card", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes))
        return NO_MEMORY;
    return add(address, bytes, file, 1);
}

int cuMemFree_v2(uint64_t address) { return take_away(address); }

struct handle {
    uint64_t bytes, serial;
    int pid, file;
    char rest[40];
};

int cuIpcGetMemHandle(struct handle *handle, uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct span *span = find(address);
    if (span)
        *handle = (struct handle){span->bytes, span->serial, getpid(), span->file, {0}};
    pthread_mutex_unlock(&lock);
    return span ? OK : INVALID;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, struct handle handle, unsigned flags)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.file);
    int file = refuses("open") ? -1 : open(path, O_RDWR | O_CLOEXEC);
    (void)flags;
    if (file < 0)
        return NOT_PERMITTED;
    int code = add(address, handle.bytes, file, 0);
    close(file);
    return code;
}

int cuIpcCloseMemHandle(uint64_t address) { return take_away(address); }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct span *span = find(address);
    if (span) {
        *base = span->base;
        *bytes = span->bytes;
    }
    pthread_mutex_unlock(&lock);
    return span ? OK : INVALID;
}

int cuPointerGetAttribute(void *to, int attribute, uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct span *span = find(address);
    if (span) {
        /* 9: the card's number, which is 0; 10: whether it has an IPC handle; 18 and 19: of a mapping, bytes and base. */
        if (attribute == 18 || attribute == 19)
            *(uint64_t *)to = attribute == 18 ? span->bytes : span->base;
        else
            *(int *)to = attribute == 10 && !span->mapped;
    }
    pthread_mutex_unlock(&lock);
    return span ? OK : INVALID;
}

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    if (refuses("memory") || refuses("pinned"))
        return NO_MEMORY;
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *memory ? OK : NO_MEMORY;
}

int cuMemFreeHost(void *memory)
{
    free(memory);
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
    memcpy((void *)to, from, bytes);
    return OK;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
    memcpy(to, (const void *)from, bytes);
    return OK;
}

/* Streams. */
struct work {
    enum { COPY, FILL, KERNEL, FREE_KERNEL, EVENT, WAIT } kind;
    uint64_t to, from;
    size_t bytes;
    struct event *event;
    int overlaps;
    struct work *next;
};

/* How often it was recorded, how many of those were passed, how many streams are to wait for it; and whether it is to go
 * when nobody knows it any more. */
struct event {
    uint64_t recorded, passed, waiting;
    int gone;
};

/* Changes a number of an event, and frees it where that was the last that keeps it. */
static void change(struct event *event, uint64_t *number, int by)
{
    pthread_mutex_lock(&lock);
    __atomic_fetch_add(number, by, __ATOMIC_RELEASE);
    int over = event->gone && event->passed == event->recorded && !event->waiting;
    pthread_mutex_unlock(&lock);
    if (over)
        free(event);
}

struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct work *first, **last;
    int busy, closing, code;
    int newest; /* the kind of what was queued last */
};

/* Kernels that are queued or run. */
static int kernels;

static void wait_at_the_gate(void)
{
    const char *gate = getenv("KVFERRY_TWIN_GATE");
    if (!gate || access(gate, F_OK))
        return;
    char knock[4096];
    snprintf(knock, sizeof knock, "%s.knock", gate);
    close(open(knock, O_CREAT | O_WRONLY, 0600));
    while (!access(gate, F_OK))
        usleep(100);
}

static void be_late(void)
{
    if (getenv("KVFERRY_TWIN_LATE_MS"))
        usleep(1000 * atoi(getenv("KVFERRY_TWIN_LATE_MS")));
}

static void carry_out_work(struct stream *stream, struct work *work)
{
    switch (work->kind) {
    case COPY:
        be_late();
        memcpy((void *)work->to, (const void *)work->from, work->bytes);
        break;
    case FILL:
        memset((void *)work->to, (int)work->from, work->bytes);
        break;
    case KERNEL:
    case FREE_KERNEL:
        be_late();
        wait_at_the_gate();
        if (refuses("run")) {
            stream->code = BROKEN;
        } else {
            const kv_header *program = (const kv_header *)work->from;
            uint32_t *signal = (uint32_t *)program->signal;
            kvferry_carry_out(program);
            __atomic_store_n(signal, 1, __ATOMIC_RELEASE);
        }
        if (work->kind == FREE_KERNEL)
            free((void *)work->from);
        __atomic_fetch_sub(&kernels, 1, __ATOMIC_RELEASE);
        break;
    case EVENT:
        change(work->event, &work->event->passed, 1);
        break;
    case WAIT:
        while (__atomic_load_n(&work->event->passed, __ATOMIC_ACQUIRE) < work->from)
            usleep(10);
        change(work->event, &work->event->waiting, -1);
    }
    free(work);
}

static int is_kernel(const struct work *work) { return work->kind == KERNEL || work->kind == FREE_KERNEL; }

static void *run(void *argument)
{
    struct stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    while (stream->first || !stream->closing) {
        struct work *work = stream->first;
        if (!work) {
            pthread_cond_wait(&stream->changed, &stream->lock);
            continue;
        }
        struct work **at = &stream->first;
        if (is_kernel(work) && work->next && is_kernel(work->next) && work->next->overlaps) {
            at = &work->next;
            work = work->next;
        }
        if (!(*at = work->next))
            stream->last = at;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        carry_out_work(stream, work);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static int push(struct stream *stream, struct work work)
{
    struct work *made = malloc(sizeof work);
    *made = work;
    made->next = NULL;
    pthread_mutex_lock(&stream->lock);
    *stream->last = made;
    stream->last = &made->next;
    stream->newest = work.kind;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return OK;
}

int cuStreamCreateWithPriority(struct stream **made, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->last = &stream->first;
    *made = stream;
    return pthread_create(&stream->thread, NULL, run, stream) ? NO_MEMORY : OK;
}

int cuStreamSynchronize(struct stream *stream)
{
    int code = once("wait");
    if (code)
        return code;
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return stream->code;
}

int cuStreamQuery(struct stream *stream)
{
    int code = once("stream");
    if (code)
        return code;
    pthread_mutex_lock(&stream->lock);
    int busy = stream->first || stream->busy;
    pthread_mutex_unlock(&stream->lock);
    return stream->code ? stream->code : busy ? NOT_READY : OK;
}

int cuStreamDestroy_v2(struct stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->closing = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    return OK;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, struct stream *stream)
{
    return push(stream, (struct work){.kind = COPY, .to = to, .from = (uint64_t)from, .bytes = bytes});
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, struct stream *stream)
{
    return push(stream, (struct work){.kind = COPY, .to = (uint64_t)to, .from = from, .bytes = bytes});
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, struct stream *stream)
{
    return push(stream, (struct work){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, struct stream *stream)
{
    return push(stream, (struct work){.kind = FILL, .to = to, .from = value, .bytes = bytes});
}

int cuEventCreate(struct event **event, unsigned flags)
{
    (void)flags;
    *event = calloc(1, sizeof **event);
    return OK;
}

int cuEventDestroy_v2(struct event *event)
{
    __atomic_store_n(&event->gone, 1, __ATOMIC_RELEASE);
    change(event, &event->passed, 0);
    return OK;
}

int cuEventRecord(struct event *event, struct stream *stream)
{
    __atomic_fetch_add(&event->recorded, 1, __ATOMIC_RELEASE);
    return push(stream, (struct work){.kind = EVENT, .event = event});
}

int cuEventQuery(struct event *event)
{
    int code = once("event");
    if (code)
        return code;
    uint64_t recorded = __atomic_load_n(&event->recorded, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&event->passed, __ATOMIC_ACQUIRE) < recorded ? NOT_READY : OK;
}

int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags)
{
    (void)flags;
    uint64_t recorded = __atomic_load_n(&event->recorded, __ATOMIC_ACQUIRE);
    change(event, &event->waiting, 1);
    return push(stream, (struct work){.kind = WAIT, .event = event, .from = recorded});
}

int cuEventElapsedTime(float *time, struct event *from, struct event *to)
{
    (void)from, (void)to;
    *time = 0;
    return OK;
}

/* The kernel. A function is the number of bytes of its parameter; 8 is that of an address. */
static int newest_cuda(void)
{
    const char *told = getenv("KVFERRY_TWIN_CUDA");
    return told ? atoi(told) : 13;
}

int cuModuleLoadData(void **module, const void *image)
{
    int made_for = 0;
    *module = &lock;
    if (sscanf(image, "code for CUDA %d", &made_for) == 1 && made_for > newest_cuda())
        return UNSUPPORTED;
    return refuses("module") ? INVALID : OK;
}

int cuModuleUnload(void *module)
{
    (void)module;
    return OK;
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    unsigned long bytes = sizeof(uint64_t);
    (void)module;
    if (!strcmp(name, "kvferry_digest"))
        return NOT_FOUND;
    sscanf(name, "kvferry_copy_%*u_%*u_%lu", &bytes);
    *function = (void *)bytes;
    return refuses("name") ? NOT_FOUND : OK;
}

int cuFuncSetAttribute(void *function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return OK;
}

struct attribute {
    int id, unused, value[16];
};

struct config {
    unsigned grid[3], block[3], shared;
    struct stream *stream;
    const struct attribute *attributes;
    unsigned count;
};

int cuLaunchKernelEx(const struct config *config, void *function, void **arguments, void **extra)
{
    (void)extra;
    size_t bytes = (size_t)function;
    /* 6: may overlap the kernel before it. */
    int overlaps = config->count == 1 && config->attributes[0].id == 6 && config->attributes[0].value[0];
    if (refuses("launch") || (refuses("next") && __atomic_load_n(&kernels, __ATOMIC_ACQUIRE)))
        return NO_MEMORY;
    pthread_mutex_lock(&config->stream->lock);
    int filled = config->stream->newest == FILL;
    pthread_mutex_unlock(&config->stream->lock);
    if (overlaps && filled)
        return INVALID;
    __atomic_fetch_add(&kernels, 1, __ATOMIC_RELEASE);
    if (bytes == sizeof(uint64_t))
        return push(config->stream,
                    (struct work){.kind = KERNEL, .from = *(uint64_t *)arguments[0], .overlaps = overlaps});
    /* A parameter is copied before the call returns. */
    void *copy = aligned_alloc(16, (bytes + 15) / 16 * 16);
    memcpy(copy, arguments[0], bytes);
    return push(config->stream, (struct work){.kind = FREE_KERNEL, .from = (uint64_t)copy, .overlaps = overlaps});
}

/* The card. */
int cuInit(unsigned flags)
{
    (void)flags;
    return OK;
}

int cuGetErrorString(int code, const char **text)
{
    *text = code == NOT_PERMITTED ? "operation not permitted" : code == BROKEN ? "an illegal memory access was encountered" : "invalid argument";
    return OK;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal ? 101 : OK;
}

int cuDeviceGetName(char *name, int length, int device)
{
    (void)device;
    snprintf(name, length, "a CPU that stands in for a GPU");
    return OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    /* 16: multiprocessors; 75 and 76: compute capability. */
    *value = attribute == 16 ? 4 : attribute == 75 ? 9 : 0;
    return OK;
}

int cuDriverGetVersion(int *version)
{
    *version = newest_cuda() * 1000;
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    (void)device;
    *context = &lock;
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    return OK;
}

int cuCtxSetCurrent(void *context)
{
    (void)context;
    return __atomic_load_n(&kernels, __ATOMIC_ACQUIRE) ? once("context") : OK;
}

int cuCtxSynchronize(void) { return OK; }

int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return OK;
}

/* Memory from the virtual-memory interface: allocations, which are files too, and addresses that they are mapped at. */
struct allocation {
    int file, uses;
};

static int made(struct allocation **handle, int file)
{
    if (file < 0)
        return NO_MEMORY;
    *handle = malloc(sizeof **handle);
    **handle = (struct allocation){file, 1};
    return OK;
}

int cuMemCreate(struct allocation **handle, size_t bytes, const void *properties, uint64_t flags)
{
    (void)properties, (void)flags;
    int file = memfd_create("mapped", MFD_CLOEXEC);
    return made(handle, file < 0 || ftruncate(file, bytes) ? -1 : file);
}

int cuMemRelease(struct allocation *handle)
{
    if (!__atomic_sub_fetch(&handle->uses, 1, __ATOMIC_ACQ_REL)) {
        close(handle->file);
        free(handle);
    }
    return OK;
}

int cuMemRetainAllocationHandle(struct allocation **handle, uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct span *span = find(address);
    *handle = span ? span->mapped : NULL;
    if (*handle)
        __atomic_add_fetch(&(*handle)->uses, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_unlock(&lock);
    return *handle ? OK : INVALID;
}

int cuMemExportToShareableHandle(int *descriptor, struct allocation *handle, unsigned type, uint64_t flags)
{
    (void)type, (void)flags;
    *descriptor = fcntl(handle->file, F_DUPFD_CLOEXEC, 0);
    return *descriptor < 0 ? NO_MEMORY : OK;
}

int cuMemImportFromShareableHandle(struct allocation **handle, uint64_t descriptor, unsigned type)
{
    (void)type;
    return made(handle, fcntl((int)descriptor, F_DUPFD_CLOEXEC, 0));
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, unsigned which)
{
    (void)properties, (void)which;
    *bytes = 1 << 16;
    return OK;
}

static int reserve(void *at, size_t bytes, void **reserved)
{
    int fixed = at ? MAP_FIXED : 0;
    *reserved = mmap(at ? at : freed, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    return *reserved == MAP_FAILED ? NO_MEMORY : OK;
}

int cuMemAddressReserve(void **base, size_t bytes, size_t alignment, uint64_t wanted, uint64_t flags)
{
    (void)alignment, (void)wanted, (void)flags;
    return reserve(NULL, bytes, base);
}

int cuMemAddressFree(void *base, size_t bytes)
{
    freed = base;
    return munmap(base, bytes) ? INVALID : OK;
}

int cuMemMap(void *base, size_t bytes, size_t offset, struct allocation *handle, uint64_t flags)
{
    (void)flags;
    struct stat stat;
    if (fstat(handle->file, &stat) || offset + bytes > (size_t)stat.st_size)
        return INVALID;
    int access = PROT_READ | PROT_WRITE;
    if (mmap(base, bytes, access, MAP_SHARED | MAP_FIXED, handle->file, offset) == MAP_FAILED)
        return INVALID;
    __atomic_add_fetch(&handle->uses, 1, __ATOMIC_ACQ_REL);
    struct span *span = malloc(sizeof *span);
    *span = (struct span){.base = (uint64_t)base, .bytes = bytes, .file = -1, .mapped = handle};
    link_in(span);
    return OK;
}

int cuMemUnmap(void *base, size_t bytes)
{
    void *same;
    struct span *span = link_out((uint64_t)base);
    if (!span)
        return INVALID;
    cuMemRelease(span->mapped);
    free(span);
    return reserve(base, bytes, &same);
}

int cuMemSetAccess(uint64_t base, size_t bytes, const void *access, size_t count)
{
    (void)base, (void)bytes, (void)access, (void)count;
    return OK;
}
