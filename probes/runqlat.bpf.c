/*
 * Run-queue latency per cgroup: how long tasks were runnable before they got a CPU, every switch of every task.
 *
 * tp_btf and raw_tp: the scheduler stamps sched_info.last_queued when a task becomes runnable; at sched_switch the wait
 * of the task that comes in is rq->clock - last_queued, exactly what it is about to add to the task's run_delay. The
 * run queue is found over se.cfs_rq, which is set for tasks of every scheduling class. The idle task is never queued.
 * Two things the stamp alone gets wrong, both when a task is moved to another CPU:
 * - A waiting task that is moved is stamped anew. What it waited before is in run_delay already, so run_delay is
 *   remembered at each arrival, with the number of arrivals to know that none was missed.
 * - A sleeping task that is still queued (delayed dequeue, Linux 6.12) is stamped when it is moved, and the stamp counts
 *   all of its sleep. Such a wait is unknown, and is counted as lost.
 *
 * classic (CLASSIC): wakeups and preemptions are stamped here, on the monotonic clock.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments.
 */
#include "common.bpf.h"

struct hist {
	u64 sum_ns;
	u64 slots[SLOTS];
};
BPF_PERCPU_ARRAY(runqlat, struct hist, PLACES);

static __always_inline int record(u64 task, u64 wait_ns)
{
	u32 place = place_of(FIELD(u64, task, TASK_GROUP));
	struct hist *hist = runqlat.lookup(&place);

	if (!hist)
		return lose(LOST_FULL);
	hist->sum_ns += wait_ns;
	hist->slots[slot_of(wait_ns)]++;
	return 0;
}

#ifndef CLASSIC

#define ASLEEP (~0ULL)
#define MIGRATING 2 /* TASK_ON_RQ_MIGRATING */

struct info {
	u64 queued, delay;
	u32 runs;
};

/* Three fields of sched_info. Where each copy is a call, all of it is copied at once: pcount comes first, last_queued last. */
static __always_inline struct info info_of(u64 task)
{
#ifdef TYPED
	return (struct info){
		.queued = FIELD(u64, task, LAST_QUEUED),
		.delay = FIELD(u64, task, RUN_DELAY),
		.runs = FIELD(u64, task, PCOUNT),
	};
#else
	u64 words[(LAST_QUEUED - PCOUNT) / 8 + 1] = {};

	bpf_probe_read_kernel(words, sizeof(words), (void *)(task + PCOUNT));
	return (struct info){
		.queued = words[(LAST_QUEUED - PCOUNT) / 8],
		.delay = words[(RUN_DELAY - PCOUNT) / 8],
		.runs = words[0],
	};
#endif
}

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 next = ctx[2], cfs_rq, rq, moved = 0;
	struct info info = info_of(next);
	struct seat *seat;
	s64 wait_ns;
	u32 pid;

	if (!info.queued)
		return 0;
	cfs_rq = FIELD(u64, next, CFS_RQ);
	rq = FIELD(u64, cfs_rq, RQ);
	wait_ns = FIELD(u64, rq, RQ_CLOCK) - info.queued;
	if (wait_ns < 0)
		return lose(LOST_BACKWARDS);
	pid = FIELD(u32, next, PID);
	seat = seat_of(pid);
	if (!seat)
		return 0;
	if (seat->pid == pid) {
		if (seat->mark == ASLEEP)
			moved = ASLEEP;
		else if (seat->runs == info.runs)
			moved = info.delay - seat->mark;
	}
	seat->pid = pid;
	seat->runs = info.runs + 1;
	seat->mark = info.delay + wait_ns;
	return moved == ASLEEP ? lose(LOST_ASLEEP) : record(next, moved + wait_ns);
}

#ifdef DELAYED
/* sched_migrate_task(struct task_struct *p, int dest_cpu): rare beside switches */
int on_migrate(u64 *ctx)
{
	u64 task = ctx[0];
	struct seat *seat;
	u32 pid;

	if (FIELD(u32, task, ON_RQ) != MIGRATING || !FIELD(u8, task, DELAYED))
		return 0;
	pid = FIELD(u32, task, PID);
	seat = seat_of(pid);
	if (!seat)
		return 0;
	seat->pid = pid;
	seat->mark = ASLEEP;
	return 0;
}
#endif

#else

static __always_inline void begin(u64 task, u64 now)
{
	u32 pid = FIELD(u32, task, PID);
	struct seat *seat = seat_of(pid);

	if (!pid || !seat)
		return;
	seat->pid = pid;
	seat->mark = now;
}

/* sched_wakeup(struct task_struct *p) and sched_wakeup_new; what runs already is not waiting */
int on_wakeup(u64 *ctx)
{
	if (!FIELD(u32, ctx[0], ON_CPU))
		begin(ctx[0], bpf_ktime_get_ns());
	return 0;
}

int on_switch(u64 *ctx)
{
	u64 prev = ctx[1], next = ctx[2], now = bpf_ktime_get_ns(), since;
	u32 pid = FIELD(u32, next, PID);
	struct seat *seat = seat_of(pid);

	/* A task that is preempted on its way to sleep is still queued: its state says sleeping, `preempt` tells. */
	if ((u8)ctx[0] || !FIELD(u32, prev, STATE))
		begin(prev, now);
	if (!pid || !seat)
		return 0;
	since = seat->mark;
	if (seat->pid != pid)
		return lose(LOST_SEAT);
	seat->mark = 0;
	return since ? record(next, now - since) : 0;
}

#endif
