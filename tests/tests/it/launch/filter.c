/* Runs a command under a seccomp filter for one system call: filter kill|trap|errno NUMBER COMMAND [ARGUMENT ...] */

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	unsigned action = SECCOMP_RET_ERRNO | EPERM;
	if (!strcmp(argv[1], "kill"))
		action = SECCOMP_RET_KILL_PROCESS;
	if (!strcmp(argv[1], "trap"))
		action = SECCOMP_RET_TRAP;
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)atoi(argv[2]), 0, 1),
		BPF_STMT(BPF_RET | BPF_K, action),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof(filter) / sizeof(*filter), filter};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program))
		return 3;
	execv(argv[3], argv + 3);
	return 4;
}
