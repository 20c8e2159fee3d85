/*
 * Length of each single throttle by a CPU quota, without a probe where throttling happens: when a throttle of a group on a
 * CPU ends, the scheduler adds it to throttled_clock_self_time of that run queue. The group's own quota cannot throttle it
 * there again before one of its tasks has run, and since Linux 6.18, which throttles task by task, no quota of an ancestor
 * can either: the growth of the sum at the next switch to a task of the group is the length of one throttle. On Linux 6.6 to
 * 6.17 an ancestor's quota, used up by siblings, can throttle the group several times before it runs: these count as one
 * throttle, and their sum is right.
 *
 * fentry and kprobe (ENDING), for kernels without that sum: unthrottle_cfs_rq() ends a throttle by the group's own quota on a
 * CPU. It updates the run queue's clock only inside, so its entry gives the beginning and its return the length. It runs with
 * interrupts off and does not nest.
 */
#include "per_cgroup.bpf.h"

struct throttles {
	u64 sum_ns;
	u64 slots[HIST_SLOTS];
};
BPF_PERCPU_ARRAY(throttles, struct throttles, CGROUP_SLOTS);

#ifndef ENDING

/* Latest sum on this CPU, and the tag of its cgroup: slots are reused by other cgroups. */
struct latest_sum {
	u64 tag;
	u64 sum_ns;
};
BPF_PERCPU_ARRAY(latest_sums, struct latest_sum, CGROUP_SLOTS);

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 next = ctx[2], cfs_rq = FIELD(u64, next, CFS_RQ), sum_ns = FIELD(u64, cfs_rq, SELF_TIME), group, tag, took;
	struct throttles *row;
	struct latest_sum *latest;
	u32 cgroup_slot;

	/* Most switches end here: the group has no quota, and no ancestor's quota has ever throttled it on this CPU. */
	if (!sum_ns && !FIELD(u32, cfs_rq, RUNTIME_ENABLED))
		return 0;
	group = FIELD(u64, next, TASK_GROUP);
	tag = tag_of(group);
	cgroup_slot = cgroup_slot_for(group, tag);
	row = throttles.lookup(&cgroup_slot);
	latest = latest_sums.lookup(&cgroup_slot);
	if (!row || !latest)
		return count_lost(LOST_FULL);
	took = sum_ns - latest->sum_ns;
	latest->sum_ns = sum_ns;
	if (latest->tag != tag) {
		latest->tag = tag;
		return 0;
	}
	if (!took)
		return 0;
	row->sum_ns += took;
	row->slots[slot_of(took)]++;
	return 0;
}

#else

struct ending {
	u64 cfs_rq;
	u64 since;
};
BPF_PERCPU_ARRAY(endings, struct ending, 1);

/* unthrottle_cfs_rq(struct cfs_rq *cfs_rq) */
int on_unthrottle(u64 *ctx)
{
	u64 cfs_rq = ARGUMENT(ctx);
	u32 only = 0;
	struct ending *ending = endings.lookup(&only);

	if (!ending)
		return 0;
	ending->cfs_rq = cfs_rq;
	ending->since = FIELD(u64, cfs_rq, THROTTLED_CLOCK);
	return 0;
}

/* Return of unthrottle_cfs_rq; since Linux 6.6 the clock is 0 if the group had nothing to run, which the kernel does not count. */
int on_unthrottled(u64 *ctx)
{
	u32 only = 0, cgroup_slot;
	struct ending *ending = endings.lookup(&only);
	struct throttles *row;
	u64 cfs_rq, rq, group, took;

	if (!ending || !ending->since)
		return 0;
#ifdef TYPED
	cfs_rq = ctx[0];
#else
	cfs_rq = ending->cfs_rq;
#endif
	if (FIELD(u32, cfs_rq, THROTTLED))
		return 0;
	rq = FIELD(u64, cfs_rq, RQ);
	took = FIELD(u64, rq, RQ_CLOCK) - ending->since;
	ending->since = 0;
	group = FIELD(u64, cfs_rq, CFS_GROUP);
	cgroup_slot = cgroup_slot_of(group);
	row = throttles.lookup(&cgroup_slot);
	if (!row)
		return count_lost(LOST_FULL);
	row->sum_ns += took;
	row->slots[slot_of(took)]++;
	return 0;
}

#endif
