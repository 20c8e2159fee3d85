/*
 * Reclaim of memory: the kernel's own in the background, per NUMA node, and what tasks have to do themselves, per cgroup.
 *
 * Arguments differ between kernels behind the first ones; only those are read (kswapd.py says which, the loader checks).
 * These events are rare beside what they stand for (a batch of 32 pages at least), so counters are shared by the CPUs and
 * added to atomically: an array per CPU would take megabytes of memory on a large machine for nothing.
 */
#include "common.bpf.h"

struct node {
	u64 pid;
	u64 since_ns;
	u64 wakeups;
	u64 active_ns;
	u64 scanned;
	u64 reclaimed;
};
BPF_ARRAY(nodes, struct node, NODES);

struct reclaim {
	u64 direct_ns;
	u64 direct[SLOTS];
	u64 limit_ns;
	u64 limit[SLOTS];
	u64 pages;
	u64 wakeups;
};
BPF_ARRAY(kswapd, struct reclaim, PLACES);

/* kswapd naps for HZ / 10 before it goes to sleep, to see whether that is too early. */
#define NAP_NS 100000000ULL

/* An element of `nodes` has one writer, the node's own kswapd. */
static __always_inline u64 active_ns(struct node *node, u64 now, u64 idle_ns)
{
	u64 since = node->since_ns, took = now - since;

	return since && took > idle_ns ? took - idle_ns : 0;
}

/* mm_vmscan_kswapd_wake(int nid, ...): once for each run over the node, in kswapd */
int on_wake(u64 *ctx)
{
	u32 nid = ctx[0];
	struct node *node = nodes.lookup(&nid);

	if (!node)
		return 0;
	node->pid = (u32)bpf_get_current_pid_tgid();
	node->since_ns = bpf_ktime_get_ns();
	node->wakeups++;
	return 0;
}

/* mm_vmscan_lru_shrink_inactive(int nid, unsigned long nr_scanned, unsigned long nr_reclaimed, ...): whoever reclaims */
int on_scan(u64 *ctx)
{
	u32 nid = ctx[0];
	struct node *node = nodes.lookup(&nid);
	u64 now;

	if (!node || node->pid != (u32)bpf_get_current_pid_tgid())
		return 0;
	now = bpf_ktime_get_ns();
	node->active_ns += active_ns(node, now, 0);
	node->since_ns = now;
	node->scanned += ctx[1];
	node->reclaimed += ctx[2];
	return 0;
}

/* mm_vmscan_kswapd_sleep(int nid): the node is balanced, and the nap has not changed that */
int on_sleep(u64 *ctx)
{
	u32 nid = ctx[0];
	struct node *node = nodes.lookup(&nid);

	if (!node)
		return 0;
	node->active_ns += active_ns(node, bpf_ktime_get_ns(), NAP_NS);
	node->since_ns = 0;
	return 0;
}

static __always_inline struct reclaim *row_of_current(void)
{
	u64 task = CURRENT();
	u32 place = place_of(FIELD(u64, task, TASK_GROUP));

	return kswapd.lookup(&place);
}

/* mm_vmscan_wakeup_kswapd(int nid, ...): an allocation finds too little free memory, and kswapd asleep */
int on_wakeup(u64 *ctx)
{
	struct reclaim *row = row_of_current();

	if (!row)
		return lose(LOST_FULL);
	lock_xadd(&row->wakeups, 1);
	return 0;
}

/* mm_vmscan_direct_reclaim_begin and mm_vmscan_memcg_reclaim_begin; a task is in one of them at a time */
int on_begin(u64 *ctx)
{
	u32 pid = bpf_get_current_pid_tgid();
	struct seat *seat = seat_of(pid);

	if (!seat)
		return 0;
	seat->pid = pid;
	seat->mark = bpf_ktime_get_ns();
	return 0;
}

/* How long the task reclaimed; 0 where that is not known, because it began before the probe did. */
static __always_inline u64 since_begin(void)
{
	u32 pid = bpf_get_current_pid_tgid();
	struct seat *seat = seat_of(pid);
	u64 since;

	if (!seat)
		return 0;
	since = seat->mark;
	if (seat->pid != pid) {
		lose(LOST_SEAT);
		return 0;
	}
	seat->mark = 0;
	return since ? bpf_ktime_get_ns() - since : 0;
}

/* mm_vmscan_direct_reclaim_end(unsigned long nr_reclaimed, ...) */
int on_direct_end(u64 *ctx)
{
	u64 took = since_begin();
	struct reclaim *row = took ? row_of_current() : NULL;

	if (!row)
		return took ? lose(LOST_FULL) : 0;
	lock_xadd(&row->direct_ns, took);
	lock_xadd(&row->direct[slot_of(took)], 1);
	lock_xadd(&row->pages, ctx[0]);
	return 0;
}

/* mm_vmscan_memcg_reclaim_end(unsigned long nr_reclaimed, ...) */
int on_limit_end(u64 *ctx)
{
	u64 took = since_begin();
	struct reclaim *row = took ? row_of_current() : NULL;

	if (!row)
		return took ? lose(LOST_FULL) : 0;
	lock_xadd(&row->limit_ns, took);
	lock_xadd(&row->limit[slot_of(took)], 1);
	lock_xadd(&row->pages, ctx[0]);
	return 0;
}
