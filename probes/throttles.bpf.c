/*
 * How long each single throttle by a CPU quota lasted, without a probe where throttling happens: the scheduler adds each
 * throttle of a group on a CPU to throttled_clock_self_time of that run queue when it ends. By its own quota the group cannot
 * be throttled there again before one of its tasks has run, and since Linux 6.18, which throttles task by task, by none above
 * it either: what the sum has grown by when a task comes in is the length of one. On Linux 6.6 to 6.17 a quota above, used up
 * by others, can throttle it several times before it runs: those are counted as one, and their sum is right.
 *
 * fentry and kprobe (ENDING), for kernels without that sum: the scheduler's own function that ends a throttle of a group by its
 * own quota on a CPU says how long it was. It brings the run queue's clock up to date only inside, so the beginning is noted at
 * its entry and the length is known at its return. It runs with interrupts off and never in itself.
 */
#include "common.bpf.h"

struct throttles {
	u64 sum_ns;
	u64 slots[SLOTS];
};
BPF_PERCPU_ARRAY(throttles, struct throttles, PLACES);

#ifndef ENDING

/* The sum as it was seen last on this CPU, and whose it was: places are given to other cgroups in time. */
struct sight {
	u64 tag;
	u64 sum_ns;
};
BPF_PERCPU_ARRAY(sights, struct sight, PLACES);

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 next = ctx[2], cfs_rq = FIELD(u64, next, CFS_RQ), sum_ns = FIELD(u64, cfs_rq, SELF_TIME), group, tag, took;
	struct throttles *row;
	struct sight *sight;
	u32 place;

	/* All that most switches cost: no quota, and none above that has ever struck here. */
	if (!sum_ns && !FIELD(u32, cfs_rq, RUNTIME_ENABLED))
		return 0;
	group = FIELD(u64, next, TASK_GROUP);
	tag = tag_of(group);
	place = place_for(group, tag);
	row = throttles.lookup(&place);
	sight = sights.lookup(&place);
	if (!row || !sight)
		return lose(LOST_FULL);
	took = sum_ns - sight->sum_ns;
	sight->sum_ns = sum_ns;
	if (sight->tag != tag) {
		sight->tag = tag;
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

/* Its return; since Linux 6.6 the clock is 0 of a group that had nothing to run, and the kernel does not count that either. */
int on_unthrottled(u64 *ctx)
{
	u32 only = 0, place;
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
	place = place_of(group);
	row = throttles.lookup(&place);
	if (!row)
		return lose(LOST_FULL);
	row->sum_ns += took;
	row->slots[slot_of(took)]++;
	return 0;
}

#endif
