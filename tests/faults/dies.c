/* Counts a process's calls that write to the file system, and kills it at one of them.
 *
 * Loaded by LD_PRELOAD. `pipefit_die_at(n, half)` arms it: the process dies just before its n-th call; with `half`, a
 * write that is the n-th call arrives by half first. Sockets, pipes and the like do not count.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int left, torn;

void pipefit_die_at(int calls, int half) {
    left = calls;
    torn = half;
}

static int is_last(void) { return left > 0 && __sync_sub_and_fetch(&left, 1) == 0; }

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int is_file(int handle) {
    struct stat found;
    return fstat(handle, &found) == 0 && (S_ISREG(found.st_mode) || S_ISDIR(found.st_mode));
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name)) dlsym(RTLD_NEXT, #name)

/* Calls by a path, and calls by a handle that write no bytes. */
#define COUNTED(name, parameters, arguments)         \
    int name parameters {                            \
        REAL(name);                                  \
        if (is_last()) die();                        \
        return real arguments;                       \
    }
COUNTED(mkdir, (const char *path, mode_t mode), (path, mode))
COUNTED(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
COUNTED(rename, (const char *from, const char *to), (from, to))
COUNTED(renameat, (int f, const char *from, int t, const char *to), (f, from, t, to))
COUNTED(renameat2, (int f, const char *from, int t, const char *to, unsigned flags), (f, from, t, to, flags))
COUNTED(unlink, (const char *path), (path))
COUNTED(unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
COUNTED(rmdir, (const char *path), (path))
COUNTED(link, (const char *from, const char *to), (from, to))
COUNTED(symlink, (const char *from, const char *to), (from, to))
COUNTED(truncate, (const char *path, off_t size), (path, size))
COUNTED(chmod, (const char *path, mode_t mode), (path, mode))
COUNTED(ftruncate, (int handle, off_t size), (handle, size))
COUNTED(ftruncate64, (int handle, off64_t size), (handle, size))
COUNTED(fallocate, (int handle, int mode, off_t at, off_t size), (handle, mode, at, size))
COUNTED(fallocate64, (int handle, int mode, off64_t at, off64_t size), (handle, mode, at, size))
COUNTED(posix_fallocate, (int handle, off_t at, off_t size), (handle, at, size))
COUNTED(posix_fallocate64, (int handle, off64_t at, off64_t size), (handle, at, size))
COUNTED(fsync, (int handle), (handle))
COUNTED(fdatasync, (int handle), (handle))

/* Opening counts where it makes or empties a file. */
#define OPENED(name, parameters, arguments)                            \
    int name parameters {                                              \
        REAL(name);                                                    \
        mode_t mode = 0;                                               \
        if (flags & (O_CREAT | __O_TMPFILE)) {                         \
            va_list more;                                              \
            va_start(more, flags);                                     \
            mode = va_arg(more, mode_t);                               \
            va_end(more);                                              \
        }                                                              \
        if ((flags & (O_CREAT | O_TRUNC)) && is_last()) die();         \
        return real arguments;                                         \
    }
OPENED(open, (const char *path, int flags, ...), (path, flags, mode))
OPENED(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENED(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPENED(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))

/* Writes, of which half may arrive, in whole blocks if it is large; of several buffers the first half of the first. */
#define HALF(size) ((size) < 8192 ? (size) / 2 : (size) / 2 / 4096 * 4096)
#define WRITTEN(name, parameters, arguments, half)     \
    ssize_t name parameters {                          \
        REAL(name);                                    \
        if (left > 0 && is_file(handle) && is_last()) { \
            if (torn) (void) !half;                    \
            die();                                     \
        }                                              \
        return real arguments;                         \
    }
#define FIRST (buffers->iov_base)
#define PART HALF(buffers->iov_len)
WRITTEN(write, (int handle, const void *data, size_t size), (handle, data, size), real(handle, data, HALF(size)))
WRITTEN(pwrite, (int handle, const void *data, size_t size, off_t at), (handle, data, size, at),
        real(handle, data, HALF(size), at))
WRITTEN(pwrite64, (int handle, const void *data, size_t size, off64_t at), (handle, data, size, at),
        real(handle, data, HALF(size), at))
WRITTEN(writev, (int handle, const struct iovec *buffers, int count), (handle, buffers, count),
        write(handle, FIRST, PART))
WRITTEN(pwritev, (int handle, const struct iovec *buffers, int count, off_t at), (handle, buffers, count, at),
        pwrite(handle, FIRST, PART, at))
WRITTEN(pwritev64, (int handle, const struct iovec *buffers, int count, off64_t at), (handle, buffers, count, at),
        pwrite64(handle, FIRST, PART, at))
