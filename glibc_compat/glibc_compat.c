/* Functions that glibc added or renamed after 2.28, built from functions that it has always had.
   See build.rs. */

#define _GNU_SOURCE
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Until 2.33 these four were inline functions around others, which still exist. 1 is the layout of
   struct stat on x86-64. */
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

/* On x86-64 these are aliases. */
int __wrap_stat(const char *path, struct stat64 *out) { return __xstat64(1, path, out); }
int __wrap_fstat(int fd, struct stat64 *out) { return __fxstat64(1, fd, out); }
int __wrap_lstat(const char *path, struct stat64 *out) { return __lxstat64(1, path, out); }
int __wrap_fstatat(int folder, const char *path, struct stat64 *out, int flags)
{
	return __fxstatat64(1, folder, path, out, flags);
}

int __wrap_gettid(void) { return (int)syscall(SYS_gettid); }

/* Rust's standard library tests the address of this function, and forks if it is null. */
__asm__(".globl __wrap_posix_spawn_file_actions_addchdir_np\n.set __wrap_posix_spawn_file_actions_addchdir_np, 0\n");

/* From 2.34 on, the C library calls the constructors of a program; before, the program had to do
   it. Rust's standard library gets the program's arguments in a constructor. Every C library calls
   the function that it is given here, and then no other constructor. */
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
