/* What glibc has added or renamed since 2.28, made of what it has had all along. build.rs says what it is for. */

#define _GNU_SOURCE
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Until 2.33 these four were inline functions around others, which are still there; 1 is the layout of struct stat on x86-64. */
int __xstat64(int layout, const char *path, struct stat64 *out);
int __fxstat64(int layout, int fd, struct stat64 *out);
int __lxstat64(int layout, const char *path, struct stat64 *out);
int __fxstatat64(int layout, int folder, const char *path, struct stat64 *out, int flags);

int __wrap_stat64(const char *path, struct stat64 *out) { return __xstat64(1, path, out); }
int __wrap_fstat64(int fd, struct stat64 *out) { return __fxstat64(1, fd, out); }
int __wrap_lstat64(const char *path, struct stat64 *out) { return __lxstat64(1, path, out); }
int __wrap_fstatat64(int folder, const char *path, struct stat64 *out, int flags)
{
	return __fxstatat64(1, folder, path, out, flags);
}

/* On x86-64 the same functions by another name. */
int __wrap_stat(const char *path, struct stat64 *out) { return __xstat64(1, path, out); }
int __wrap_fstat(int fd, struct stat64 *out) { return __fxstat64(1, fd, out); }

int __wrap_gettid(void) { return (int)syscall(SYS_gettid); }

/* Rust's library asks whether it is there, by its address, and forks where it is not. */
__asm__(".globl __wrap_posix_spawn_file_actions_addchdir_np\n.set __wrap_posix_spawn_file_actions_addchdir_np, 0\n");

/* A program that is linked on 2.34 or newer leaves its constructors to the C library, which an older one leaves to the program. Rust's
   library learns the arguments in a constructor. Every C library calls what it is given here, and then nothing else. */
typedef void constructor(int argc, char **argv, char **variables);
extern constructor *const __init_array_start[] __attribute__((visibility("hidden")));
extern constructor *const __init_array_end[] __attribute__((visibility("hidden")));

static void construct(int argc, char **argv, char **variables)
{
	for (constructor *const *each = __init_array_start; each != __init_array_end; each++)
		(*each)(argc, argv, variables);
}

int first___libc_start_main(int (*program)(int, char **, char **), int argc, char **argv, constructor *construct,
			    void (*destruct)(void), void (*loader)(void), void *stack);
__asm__(".symver first___libc_start_main, __libc_start_main@GLIBC_2.2.5");

int __wrap___libc_start_main(int (*program)(int, char **, char **), int argc, char **argv, constructor *given,
			     void (*destruct)(void), void (*loader)(void), void *stack)
{
	return first___libc_start_main(program, argc, argv, given ? given : construct, destruct, loader, stack);
}
