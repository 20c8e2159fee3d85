/*
 * Wakeups of tasks by the cgroup of the waker, and the time from each wakeup until the woken task runs.
 *
 * sched_waking runs on the waking CPU, so the current task is the waker; sched_wakeup may already run on the CPU of the woken
 * task. A new task is woken by its parent. The timestamp stays in the woken task's slot until it is switched in. A task that
 * is woken before it has left its CPU continues at once: its wakeup latency is 0.
 *
 * A wakeup in an interrupt is unrelated to the interrupted task; the kernel's preemption count shows the context. There is one
 * exception: packets that a task sends over loopback or to another network namespace of this node are received by the same
 * CPU in a softirq that the sender raised, so wakeups in that softirq count for the sender. If several tasks raised it before
 * it ran, or if an earlier run left packets over, the sender is unknown, and the wakeups count as an interrupt's.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments.
 */
#include "per_cgroup.bpf.h"
#include "cgroup_pairs.bpf.h"

#ifdef SOFTIRQ_OF_TASK
#error this kernel is a PREEMPT_RT one, which counts softirqs by task, so interrupts cannot be distinguished from tasks
#endif

#define NO_CGROUP 0U
#define INTERRUPT 0xFFFFFFFFU
#define KERNEL_THREAD 0xFFFFFFFEU
#define PF_KTHREAD 0x00200000
#define NET_RX 3
#ifndef HOT_PREEMPT_COUNT
#define HOT_PREEMPT_COUNT 0
#endif
#define SERVING_SOFTIRQ 0x000100 /* SOFTIRQ_OFFSET */
#define IN_HARDIRQ 0xFF0000	 /* HARDIRQ_MASK | NMI_MASK */

/* Wakeups without a waking cgroup, by origin. */
struct hist {
	u64 sum_ns;
	u64 slots[HIST_SLOTS];
};
struct woken {
	struct hist interrupt, kernel_thread, other;
};
BPF_PERCPU_ARRAY(wakeups, struct woken, CGROUP_SLOTS);

/* Senders of packets that this CPU is about to receive, and is receiving: low half of a tag or one of the constants above. */
struct receiving {
	u32 requested, active;
};
BPF_PERCPU_ARRAY(receivings, struct receiving, 1);

/*
 * Preemption count of this CPU: the nesting of interrupts and softirqs. Where it is a per-CPU variable, its distance to the
 * CPU's run queue is the same on all CPUs; its address is not taken from a symbol table, because not every kernel lists data
 * symbols.
 */
static __always_inline u32 preempt_count(void)
{
	u64 task = CURRENT();
#ifdef PREEMPT_COUNT
	return FIELD(u32, task, PREEMPT_COUNT);
#elif defined CPU_PREEMPT_COUNT && defined RUNQUEUES
	u64 cfs_rq = FIELD(u64, task, CFS_RQ), rq = FIELD(u64, cfs_rq, RQ);
	u32 count = 0;

	bpf_probe_read_kernel(&count, sizeof(count), (void *)(rq + CPU_PREEMPT_COUNT + HOT_PREEMPT_COUNT - RUNQUEUES));
	return count;
#else
#error the BTF of this kernel has no preemption count, so interrupts cannot be distinguished from tasks
#endif
}

static __always_inline struct receiving *receiving(void)
{
	u32 only = 0;

	return receivings.lookup(&only);
}

/* Waker of a wakeup that happens now: low half of the current task's tag, or one of the constants above. */
static __always_inline u32 waker_of_context(void)
{
	u32 count = preempt_count();
	struct receiving *here;
	u64 task, group, tag;

	if (count & IN_HARDIRQ)
		return INTERRUPT;
	if (count & SERVING_SOFTIRQ) {
		here = receiving();
		return here && here->active != NO_CGROUP ? here->active : INTERRUPT;
	}
	task = CURRENT();
	if (FIELD(u32, task, FLAGS) & PF_KTHREAD)
		return KERNEL_THREAD;
	group = FIELD(u64, task, TASK_GROUP);
	tag = tag_of(group);
	cgroup_slot_for(group, tag); /* enters the tag into the table, so that the reader can resolve it */
	return tag;
}

static __always_inline int count(u64 task, u32 waker, u64 ns)
{
	u64 group = FIELD(u64, task, TASK_GROUP), tag = tag_of(group);
	u32 cgroup_slot = cgroup_slot_for(group, tag), slot = slot_of(ns);
	struct woken *woken = wakeups.lookup(&cgroup_slot);
	struct hist *hist;
	struct pair *pair;

	if (!woken)
		return count_lost(LOST_FULL);
	if (waker == INTERRUPT) {
		hist = &woken->interrupt;
	} else if (waker == KERNEL_THREAD) {
		hist = &woken->kernel_thread;
	} else {
		pair = pair_of(tag << 32 | waker);
		if (pair) {
			pair->ns += ns;
			pair->slots[slot]++;
			return 0;
		}
		hist = &woken->other;
	}
	hist->sum_ns += ns;
	hist->slots[slot]++;
	return 0;
}

static __always_inline void stamp_wakeup(u64 task, u32 waker)
{
	u32 pid = FIELD(u32, task, PID);
	struct task_slot *task_slot = task_slot_of(pid);

	if (!task_slot)
		return;
	if (task_slot->stamp && task_slot->pid != pid)
		count_lost(LOST_TASK_SLOT);
	task_slot->pid = pid;
	task_slot->waker = waker;
	task_slot->stamp = bpf_ktime_get_ns();
}

/* sched_waking(struct task_struct *p): p sleeps, or was about to: it is then still queued and on a CPU, and continues */
int on_waking(u64 *ctx)
{
	u64 task = ctx[0];
	u32 waker = waker_of_context();

	if (FIELD(u32, task, ON_CPU) && FIELD(u32, task, ON_RQ))
		return count(task, waker, 0);
	stamp_wakeup(task, waker);
	return 0;
}

/* sched_wakeup_new(struct task_struct *p), in the parent */
int on_new(u64 *ctx)
{
	stamp_wakeup(ctx[0], waker_of_context());
	return 0;
}

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 next = ctx[2], now, since;
	u32 pid = FIELD(u32, next, PID);
	struct task_slot *task_slot = task_slot_of(pid);

	if (!task_slot || task_slot->pid != pid || !task_slot->stamp)
		return 0;
	since = task_slot->stamp;
	task_slot->stamp = 0;
	now = bpf_ktime_get_ns();
	return now < since ? count_lost(LOST_BACKWARDS) : count(next, task_slot->waker, now - since);
}

/* softirq_raise(unsigned int vec_nr), with interrupts off */
int on_raise(u64 *ctx)
{
	struct receiving *here = receiving();
	u32 waker;

	if ((u32)ctx[0] != NET_RX || !here)
		return 0;
	waker = here->active == NO_CGROUP ? waker_of_context() : INTERRUPT;
	here->requested = here->requested == NO_CGROUP || here->requested == waker ? waker : INTERRUPT;
	return 0;
}

/* softirq_entry(unsigned int vec_nr) */
int on_softirq(u64 *ctx)
{
	struct receiving *here = receiving();

	if ((u32)ctx[0] == NET_RX && here) {
		here->active = here->requested;
		here->requested = NO_CGROUP;
	}
	return 0;
}

/* softirq_exit(unsigned int vec_nr) */
int on_softirq_end(u64 *ctx)
{
	struct receiving *here = receiving();

	if ((u32)ctx[0] == NET_RX && here)
		here->active = NO_CGROUP;
	return 0;
}
