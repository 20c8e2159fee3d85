/*
 * Run-queue latency per cgroup: how long tasks were runnable before they got a CPU, at every switch of every task.
 *
 * tp_btf and raw_tp: the scheduler stamps sched_info.last_queued when a task becomes runnable; at sched_switch the wait
 * of the task that comes in is rq->clock - last_queued, exactly what it is about to add to the task's run_delay. The
 * run queue is reached through se.cfs_rq, which is set for tasks of every scheduling class. The idle task is never queued.
 * The stamp alone is wrong in two cases, both when a task is moved to another CPU:
 * - A waiting task that is moved gets a new stamp. The wait before the move is already in run_delay, so run_delay is
 *   stored at each arrival, together with the number of arrivals, which shows whether one was missed.
 * - A sleeping task that is still queued (delayed dequeue, Linux 6.12) is stamped when it is moved, and the stamp includes
 *   its whole sleep. Such a wait is unknown, and is counted as lost.
 *
 * With BLAME each wait is also split among the cgroups that ran on the CPU meanwhile: blame.bpf.h.
 *
 * classic (CLASSIC): wakeups and preemptions are stamped here, on the monotonic clock.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments.
 */
#include "per_cgroup.bpf.h"
#include "blame.bpf.h"

struct hist {
	u64 sum_ns;
	u64 slots[HIST_SLOTS];
#ifdef BLAME
	struct parts parts;
#endif
};
BPF_PERCPU_ARRAY(runqlat, struct hist, CGROUP_SLOTS);

static __always_inline struct hist *record(u32 cgroup_slot, u64 wait_ns)
{
	struct hist *hist = runqlat.lookup(&cgroup_slot);

	if (!hist) {
		count_lost(LOST_FULL);
		return NULL;
	}
	hist->sum_ns += wait_ns;
	hist->slots[slot_of(wait_ns)]++;
	return hist;
}

#ifndef CLASSIC

#define SLEEP_UNKNOWN (~0ULL)
#define MIGRATING 2 /* TASK_ON_RQ_MIGRATING */

struct info {
	u64 queued, delay;
	u32 runs;
};

/* Three fields of sched_info. Untyped forms copy the struct with one helper call: pcount is its first field, last_queued its last. */
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
 * Time that the next task had waited on other CPUs before it was moved to this one; SLEEP_UNKNOWN if that is not known.
 * `split` is the part of it that was split among aggressors already. Stores the task's run_delay for its next wait.
 */
static __always_inline u64 waited_elsewhere(u64 task, struct info *info, u64 here, u64 *split)
{
	u32 pid = FIELD(u32, task, PID);
	struct task_slot *task_slot = task_slot_of(pid);
	u64 moved = 0;

	if (!task_slot)
		return 0;
	if (task_slot->pid == pid) {
		if (task_slot->stamp == SLEEP_UNKNOWN)
			moved = SLEEP_UNKNOWN;
		else if (task_slot->runs == info->runs)
			moved = info->delay - task_slot->stamp;
#ifdef BLAME
		if (moved && moved != SLEEP_UNKNOWN)
			*split = split_before(pid, task_slot->stamp, info->delay);
#endif
	} else if (task_slot->stamp == SLEEP_UNKNOWN) {
		count_lost(LOST_TASK_SLOT);
	}
	task_slot->pid = pid;
	task_slot->runs = info->runs + 1;
	task_slot->stamp = info->delay + here;
	return moved;
}

/* Count the wait of the next task; it spent `moved` of it on other CPUs. */
static __always_inline void count(struct waited *wait, u64 moved, u64 split)
{
	u64 here = wait->end - wait->begin;
	struct hist *hist = record(wait->cgroup_slot, moved + here);

#ifdef BLAME
	if (!hist)
		return;
	hist->parts.other_ns += moved - split;
	if (here)
		split_on_cpu(&hist->parts, wait);
#endif
}

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 next = ctx[2], group, rq, moved, split = 0;
	struct info info = info_of(next);
	struct waited wait;

	on_leave_cpu(ctx[1]);
	if (!info.queued) {
		on_idle_in(next);
		return 0;
	}
	group = FIELD(u64, next, TASK_GROUP);
	wait.tag = tag_of(group);
	wait.cgroup_slot = cgroup_slot_for(group, wait.tag);
	wait.cfs_rq = FIELD(u64, next, CFS_RQ);
	rq = FIELD(u64, wait.cfs_rq, RQ);
	wait.end = FIELD(u64, rq, RQ_CLOCK);
	wait.begin = info.queued;
	wait.valid = 0;
	if (wait.begin > wait.end) {
		count_lost(LOST_BACKWARDS);
	} else {
		moved = waited_elsewhere(next, &info, wait.end - wait.begin, &split);
		wait.valid = moved != SLEEP_UNKNOWN;
		if (wait.valid)
			count(&wait, moved, split);
		else
			count_lost(LOST_ASLEEP);
	}
	on_task_in(next, &wait);
	return 0;
}

#ifdef BLAME
/* Split the part of a wait that ends because the task is moved: the timeline of the CPU that it leaves has the aggressors. */
static __always_inline void on_migrate_waiting(u64 task)
{
	struct info info = info_of(task);
	u32 pid = FIELD(u32, task, PID);
	struct task_slot *task_slot = task_slot_of(pid);
	struct waited wait;
	struct hist *hist;
	u64 group;

	if (!task_slot || task_slot->pid != pid || task_slot->stamp == SLEEP_UNKNOWN)
		return;
	if (task_slot->runs != info.runs || task_slot->stamp == info.delay)
		return;
	group = FIELD(u64, task, TASK_GROUP);
	wait.tag = tag_of(group);
	wait.cgroup_slot = cgroup_slot_for(group, wait.tag);
	wait.cfs_rq = FIELD(u64, task, CFS_RQ);
	hist = runqlat.lookup(&wait.cgroup_slot);
	if (hist)
		split_on_migration(&hist->parts, &wait, pid, task_slot->stamp, info.delay);
}
#endif

#if defined(DELAYED) || defined(BLAME)
/* sched_migrate_task(struct task_struct *p, int dest_cpu): rare compared with switches */
int on_migrate(u64 *ctx)
{
	u64 task = ctx[0];

	if (FIELD(u32, task, ON_RQ) != MIGRATING)
		return 0;
#ifdef DELAYED
	if (FIELD(u8, task, DELAYED)) {
		u32 pid = FIELD(u32, task, PID);
		struct task_slot *task_slot = task_slot_of(pid);

		if (task_slot) {
			task_slot->pid = pid;
			task_slot->stamp = SLEEP_UNKNOWN;
		}
		return 0;
	}
#endif
#ifdef BLAME
	on_migrate_waiting(task);
#endif
	return 0;
}
#endif

#else

static __always_inline void stamp_runnable(u64 task, u64 now)
{
	u32 pid = FIELD(u32, task, PID);
	struct task_slot *task_slot = task_slot_of(pid);

	if (!pid || !task_slot)
		return;
	task_slot->pid = pid;
	task_slot->stamp = now;
}

/* sched_wakeup(struct task_struct *p) and sched_wakeup_new; a task that still runs is not waiting */
int on_wakeup(u64 *ctx)
{
	if (!FIELD(u32, ctx[0], ON_CPU))
		stamp_runnable(ctx[0], bpf_ktime_get_ns());
	return 0;
}

int on_switch(u64 *ctx)
{
	u64 prev = ctx[1], next = ctx[2], now = bpf_ktime_get_ns(), since;
	u32 pid = FIELD(u32, next, PID);
	struct task_slot *task_slot = task_slot_of(pid);

	/* A task that is preempted on its way to sleep is still queued although its state says sleeping: `preempt` is set. */
	if ((u8)ctx[0] || !FIELD(u32, prev, STATE))
		stamp_runnable(prev, now);
	if (!pid || !task_slot)
		return 0;
	since = task_slot->stamp;
	if (task_slot->pid != pid)
		return count_lost(LOST_TASK_SLOT);
	task_slot->stamp = 0;
	if (since)
		record(cgroup_slot_of(FIELD(u64, next, TASK_GROUP)), now - since);
	return 0;
}

#endif
