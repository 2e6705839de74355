/*
 * The clock of a program that is loaded with this library: CLOCK_FILE contains the seconds by which
 * it is ahead of that of the machine. It is read for each question.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    char text[32] = {0};
    const char *path = getenv("CLOCK_FILE");
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result || clock != CLOCK_REALTIME || !path)
        return result;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        if (read(file, text, sizeof text - 1) > 0)
            now->tv_sec += atol(text);
        close(file);
    }
    return 0;
}
