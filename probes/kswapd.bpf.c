/*
 * Memory reclaim: in the background by kswapd, per NUMA node, and directly by tasks, per cgroup.
 *
 * Kernels differ in the later arguments of these tracepoints; only the first ones are read (kswapd.py lists them, the loader
 * checks them). Each event stands for a batch of at least 32 pages, so the counters are shared by all CPUs and updated
 * atomically: a per-CPU array would waste megabytes on a large machine.
 */
#include "per_cgroup.bpf.h"

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
	u64 direct[HIST_SLOTS];
	u64 limit_ns;
	u64 limit[HIST_SLOTS];
	u64 pages;
	u64 wakeups;
};
BPF_ARRAY(kswapd, struct reclaim, CGROUP_SLOTS);

/* kswapd sleeps for HZ / 10 before it sleeps fully, to see whether that is premature (kswapd_try_to_sleep in mm/vmscan.c). */
#define NAP_NS 100000000ULL

/* Active time until now, less the idle part. An element of `nodes` has one writer, the node's own kswapd. */
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

/* mm_vmscan_lru_shrink_inactive(int nid, unsigned long nr_scanned, unsigned long nr_reclaimed, ...), in any reclaiming task */
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

/* mm_vmscan_kswapd_sleep(int nid): the node is balanced, also after the short sleep */
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
	u32 cgroup_slot = cgroup_slot_of(FIELD(u64, task, TASK_GROUP));

	return kswapd.lookup(&cgroup_slot);
}

/* mm_vmscan_wakeup_kswapd(int nid, ...): an allocation found too little free memory while kswapd slept */
int on_wakeup(u64 *ctx)
{
	struct reclaim *row = row_of_current();

	if (!row)
		return count_lost(LOST_FULL);
	lock_xadd(&row->wakeups, 1);
	return 0;
}

/* mm_vmscan_direct_reclaim_begin and mm_vmscan_memcg_reclaim_begin; a task is in at most one of them at a time */
int on_begin(u64 *ctx)
{
	u32 pid = bpf_get_current_pid_tgid();
	struct task_slot *task_slot = task_slot_of(pid);

	if (!task_slot)
		return 0;
	task_slot->pid = pid;
	task_slot->stamp = bpf_ktime_get_ns();
	return 0;
}

/* Duration of the current task's reclaim; 0 if unknown because the reclaim began before the probe was loaded. */
static __always_inline u64 since_begin(void)
{
	u32 pid = bpf_get_current_pid_tgid();
	struct task_slot *task_slot = task_slot_of(pid);
	u64 since;

	if (!task_slot)
		return 0;
	since = task_slot->stamp;
	if (task_slot->pid != pid) {
		count_lost(LOST_TASK_SLOT);
		return 0;
	}
	task_slot->stamp = 0;
	return since ? bpf_ktime_get_ns() - since : 0;
}

/* mm_vmscan_direct_reclaim_end(unsigned long nr_reclaimed, ...) */
int on_direct_end(u64 *ctx)
{
	u64 took = since_begin();
	struct reclaim *row = took ? row_of_current() : NULL;

	if (!row)
		return took ? count_lost(LOST_FULL) : 0;
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
		return took ? count_lost(LOST_FULL) : 0;
	lock_xadd(&row->limit_ns, took);
	lock_xadd(&row->limit[slot_of(took)], 1);
	lock_xadd(&row->pages, ctx[0]);
	return 0;
}
