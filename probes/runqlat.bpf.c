/*
 * Run-queue latency per cgroup: how long tasks were runnable before they got a CPU, every switch of every task.
 *
 * tp_btf and raw_tp: the scheduler stamps sched_info.last_queued when a task becomes runnable; at sched_switch the wait
 * of the task that comes in is rq->clock - last_queued, exactly what it is about to add to the task's run_delay. The
 * run queue is found over se.cfs_rq, which is set for tasks of every scheduling class. The idle task is never queued.
 * classic (CLASSIC): wakeups and preemptions are stamped here, in a map by pid, on the monotonic clock.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments.
 */
#include "common.bpf.h"

struct hist {
	u64 sum_ns;
	u64 slots[SLOTS];
};
BPF_PERCPU_ARRAY(runqlat, struct hist, PLACES);

static __always_inline int record(u64 task, s64 wait_ns)
{
	struct hist *hist;
	u32 place;

	if (wait_ns < 0)
		return lose(LOST_BACKWARDS);
	place = place_of(FIELD(u64, task, TASK_GROUP));
	hist = runqlat.lookup(&place);
	if (!hist)
		return lose(LOST_FULL);
	hist->sum_ns += wait_ns;
	hist->slots[slot_of(wait_ns)]++;
	return 0;
}

#ifndef CLASSIC

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 next = ctx[2], queued = FIELD(u64, next, LAST_QUEUED), cfs_rq, rq;

	if (!queued)
		return 0;
	cfs_rq = FIELD(u64, next, CFS_RQ);
	rq = FIELD(u64, cfs_rq, RQ);
	return record(next, FIELD(u64, rq, RQ_CLOCK) - queued);
}

#else

BPF_HASH(start, u32, u64, WAITING);

static __always_inline int begin(u64 task)
{
	u32 pid = FIELD(u32, task, PID);
	u64 now = bpf_ktime_get_ns();

	if (pid && start.update(&pid, &now) != 0)
		return lose(LOST_START);
	return 0;
}

/* sched_wakeup(struct task_struct *p) and sched_wakeup_new */
int on_wakeup(u64 *ctx)
{
	return begin(ctx[0]);
}

int on_switch(u64 *ctx)
{
	u64 prev = ctx[1], next = ctx[2], *since, wait_ns;
	u32 pid;

	/* A task that is preempted on its way to sleep is still queued: its state says sleeping, `preempt` tells. */
	if ((u8)ctx[0] || !FIELD(u32, prev, STATE))
		begin(prev);
	pid = FIELD(u32, next, PID);
	since = start.lookup(&pid);
	if (!since)
		return 0;
	wait_ns = bpf_ktime_get_ns() - *since;
	start.delete(&pid);
	return record(next, wait_ns);
}

#endif
