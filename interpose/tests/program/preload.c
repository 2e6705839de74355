/* A library for LD_PRELOAD that has its own pwrite: it claims 100 bytes more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

ssize_t
pwrite(int fd, const void *bytes, size_t size, off_t offset)
{
	ssize_t (*next) (int, const void *, size_t, off_t) =
		(ssize_t (*) (int, const void *, size_t, off_t)) dlsym(RTLD_NEXT, "pwrite");

	return next(fd, bytes, size, offset) + 100;
}
