/*
 * Current state of threads: an iterator that writes one record for every thread of the reader's pid namespace. Nothing runs,
 * and nothing is stored, between two reads.
 */
#include "kernel.bpf.h"

/* include/linux/sched.h; the same numbers since Linux 4.14. */
#define TASK_UNINTERRUPTIBLE 0x002
#define TASK_NOLOAD 0x400
#define NOT_RUNNABLE 0x90FD /* asleep, stopped, traced, parked, dead, waiting for a lock of PREEMPT_RT, or frozen */

/* decode() in probes/threads.py has the same order. */
enum { RUNNABLE, UNINTERRUPTIBLE, IOWAIT, SLEEPING };

struct record {
	u64 cgroup_id;
	u64 kind;
};

static __always_inline u64 kind_of(u64 task)
{
	u64 state = FIELD(u32, task, STATE);

	/* Idle kernel threads are uninterruptible but do not count as load (TASK_IDLE): they sleep. */
	if ((state & (TASK_UNINTERRUPTIBLE | TASK_NOLOAD)) == TASK_UNINTERRUPTIBLE)
		return FIELD(u8, task, IN_IOWAIT) & IN_IOWAIT_BIT ? IOWAIT : UNINTERRUPTIBLE;
	return state & (TASK_UNINTERRUPTIBLE | NOT_RUNNABLE) ? SLEEPING : RUNNABLE;
}

/* bpf_iter__task: { struct bpf_iter_meta *meta; struct task_struct *task; }, without a task at the end */
int on_task(u64 *ctx)
{
	u64 meta = ctx[0], task = ctx[1], sequence;
	struct record record = {};

	if (!task)
		return 0;
	if (FIELD(u32, task, EXIT_STATE)) /* zombie or dead */
		return 0;
	record.cgroup_id = cgroup_id_of_task(task);
	record.kind = kind_of(task);
	sequence = FIELD(u64, meta, SEQUENCE);
	bpf_seq_write((struct seq_file *)sequence, &record, sizeof(record));
	return 0;
}
