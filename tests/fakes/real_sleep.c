/* Before libfaketime in LD_PRELOAD: sleeps as the kernel does. libfaketime 0.9.10 moves the end of an absolute sleep from
   the wall clock's time to the monotonic one's although it fakes only the first, and every time.sleep of Python 3.11 and
   newer is EINVAL (mended in 0.9.11). */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) == 0 ? 0 : errno;
}
