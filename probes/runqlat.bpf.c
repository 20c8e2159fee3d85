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
 * With BLAME they also split each wait among those who had the CPU meanwhile: blame.bpf.h.
 *
 * classic (CLASSIC): wakeups and preemptions are stamped here, on the monotonic clock.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments.
 */
#include "common.bpf.h"
#include "blame.bpf.h"

struct hist {
	u64 sum_ns;
	u64 slots[SLOTS];
#ifdef BLAME
	struct parts parts;
#endif
};
BPF_PERCPU_ARRAY(runqlat, struct hist, PLACES);

static __always_inline struct hist *record(u32 place, u64 wait_ns)
{
	struct hist *hist = runqlat.lookup(&place);

	if (!hist) {
		lose(LOST_FULL);
		return NULL;
	}
	hist->sum_ns += wait_ns;
	hist->slots[slot_of(wait_ns)]++;
	return hist;
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

/*
 * What a task that comes in had waited elsewhere when it was moved to this CPU, or ASLEEP where that is not known; `split` is
 * how much of it has been split. It is remembered for the next time.
 */
static __always_inline u64 waited_elsewhere(u64 task, struct info *info, u64 here, u64 *split)
{
	u32 pid = FIELD(u32, task, PID);
	struct seat *seat = seat_of(pid);
	u64 moved = 0;

	if (!seat)
		return 0;
	if (seat->pid == pid) {
		if (seat->mark == ASLEEP)
			moved = ASLEEP;
		else if (seat->runs == info->runs)
			moved = info->delay - seat->mark;
#ifdef BLAME
		if (moved && moved != ASLEEP)
			*split = split_before(pid, seat->mark, info->delay);
#endif
	} else if (seat->mark == ASLEEP) {
		lose(LOST_SEAT);
	}
	seat->pid = pid;
	seat->runs = info->runs + 1;
	seat->mark = info->delay + here;
	return moved;
}

/* The wait of the task that comes in, `moved` of it elsewhere. */
static __always_inline void count(struct waited *wait, u64 moved, u64 split)
{
	u64 here = wait->end - wait->begin;
	struct hist *hist = record(wait->place, moved + here);

#ifdef BLAME
	if (!hist)
		return;
	hist->parts.other_ns += moved - split;
	if (here)
		split_here(&hist->parts, wait);
#endif
}

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 next = ctx[2], group, rq, moved, split = 0;
	struct info info = info_of(next);
	struct waited wait;

	leave(ctx[1]);
	if (!info.queued) {
		idle_comes_in(next);
		return 0;
	}
	group = FIELD(u64, next, TASK_GROUP);
	wait.tag = tag_of(group);
	wait.place = place_for(group, wait.tag);
	wait.cfs_rq = FIELD(u64, next, CFS_RQ);
	rq = FIELD(u64, wait.cfs_rq, RQ);
	wait.end = FIELD(u64, rq, RQ_CLOCK);
	wait.begin = info.queued;
	wait.known = 0;
	if (wait.begin > wait.end) {
		lose(LOST_BACKWARDS);
	} else {
		moved = waited_elsewhere(next, &info, wait.end - wait.begin, &split);
		wait.known = moved != ASLEEP;
		if (wait.known)
			count(&wait, moved, split);
		else
			lose(LOST_ASLEEP);
	}
	task_comes_in(next, &wait);
	return 0;
}

#ifdef BLAME
/* The part of a wait that ends because the task is moved: the CPU that it leaves knows who made it wait. */
static __always_inline void moves_on(u64 task)
{
	struct info info = info_of(task);
	u32 pid = FIELD(u32, task, PID);
	struct seat *seat = seat_of(pid);
	struct waited wait;
	struct hist *hist;
	u64 group;

	if (!seat || seat->pid != pid || seat->mark == ASLEEP || seat->runs != info.runs || seat->mark == info.delay)
		return;
	group = FIELD(u64, task, TASK_GROUP);
	wait.tag = tag_of(group);
	wait.place = place_for(group, wait.tag);
	wait.cfs_rq = FIELD(u64, task, CFS_RQ);
	hist = runqlat.lookup(&wait.place);
	if (hist)
		split_there(&hist->parts, &wait, pid, seat->mark, info.delay);
}
#endif

#if defined(DELAYED) || defined(BLAME)
/* sched_migrate_task(struct task_struct *p, int dest_cpu): rare beside switches */
int on_migrate(u64 *ctx)
{
	u64 task = ctx[0];

	if (FIELD(u32, task, ON_RQ) != MIGRATING)
		return 0;
#ifdef DELAYED
	if (FIELD(u8, task, DELAYED)) {
		u32 pid = FIELD(u32, task, PID);
		struct seat *seat = seat_of(pid);

		if (seat) {
			seat->pid = pid;
			seat->mark = ASLEEP;
		}
		return 0;
	}
#endif
#ifdef BLAME
	moves_on(task);
#endif
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
	if (since)
		record(place_of(FIELD(u64, next, TASK_GROUP)), now - since);
	return 0;
}

#endif
