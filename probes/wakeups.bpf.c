/*
 * Who wakes whom: every wakeup of a task by the cgroup that woke it, and how long it took from there until the task ran.
 *
 * sched_waking runs where the waking is done, so the current task is the waker, where sched_wakeup may already run on the
 * CPU of the woken one; a new task is woken by its maker. The moment is remembered in the task's seat until it is switched
 * in. A task that was woken before it had left its CPU goes on at once: its wakeup took no time.
 *
 * Whoever wakes in an interrupt has nothing to do with the task that it interrupted: the kernel's count of preemption tells.
 * One kind of interrupt is somebody's own doing. What a task sends over loopback or to another network namespace of this
 * node is received by the same CPU in a softirq that the sender asked for: wakeups there are those of the one who asked.
 * Where several asked before it ran, and where the softirq left packets over for its next run, they may be anybody's: then
 * they are an interrupt's.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments.
 */
#include "common.bpf.h"
#include "pairs.bpf.h"

#ifdef SOFTIRQ_OF_TASK
#error this kernel is a PREEMPT_RT one, which counts softirqs by task, so interrupts cannot be told from tasks
#endif

#define NOBODY 0U
#define INTERRUPT 0xFFFFFFFFU
#define KERNEL_THREAD 0xFFFFFFFEU
#define PF_KTHREAD 0x00200000
#define NET_RX 3
#ifndef HOT_PREEMPT_COUNT
#define HOT_PREEMPT_COUNT 0
#endif
#define SERVING_SOFTIRQ 0x000100 /* SOFTIRQ_OFFSET */
#define IN_HARDIRQ 0xFF0000	 /* HARDIRQ_MASK | NMI_MASK */

/* What is no cgroup's doing, by who did it. */
struct hist {
	u64 sum_ns;
	u64 slots[SLOTS];
};
struct woken {
	struct hist interrupt, kernel_thread, other;
};
BPF_PERCPU_ARRAY(wakeups, struct woken, PLACES);

/* For whom this CPU is to receive packets, and for whom it is doing that: a tag's low half or one of the numbers above. */
struct receiving {
	u32 asked, now;
};
BPF_PERCPU_ARRAY(receivings, struct receiving, 1);

/*
 * How deep in interrupts and the like this CPU is. Where that is a per-CPU variable, it lies at the same distance from the
 * CPU's run queue everywhere; its address is asked of no symbol table, because not every kernel lists data there.
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
#error this kernel does not say where it counts preemption, so interrupts cannot be told from tasks
#endif
}

static __always_inline struct receiving *receiving(void)
{
	u32 only = 0;

	return receivings.lookup(&only);
}

/* Who does what is being done now. */
static __always_inline u32 doer(void)
{
	u32 count = preempt_count();
	struct receiving *here;
	u64 task, group, tag;

	if (count & IN_HARDIRQ)
		return INTERRUPT;
	if (count & SERVING_SOFTIRQ) {
		here = receiving();
		return here && here->now != NOBODY ? here->now : INTERRUPT;
	}
	task = CURRENT();
	if (FIELD(u32, task, FLAGS) & PF_KTHREAD)
		return KERNEL_THREAD;
	group = FIELD(u64, task, TASK_GROUP);
	tag = tag_of(group);
	place_for(group, tag); /* so that the reader knows whose tag it is */
	return tag;
}

static __always_inline int count(u64 task, u32 who, u64 ns)
{
	u64 group = FIELD(u64, task, TASK_GROUP), tag = tag_of(group);
	u32 place = place_for(group, tag), slot = slot_of(ns);
	struct woken *woken = wakeups.lookup(&place);
	struct hist *hist;
	struct pair *pair;

	if (!woken)
		return lose(LOST_FULL);
	if (who == INTERRUPT) {
		hist = &woken->interrupt;
	} else if (who == KERNEL_THREAD) {
		hist = &woken->kernel_thread;
	} else {
		pair = pair_of(tag << 32 | who);
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

static __always_inline void remember(u64 task, u32 who)
{
	u32 pid = FIELD(u32, task, PID);
	struct seat *seat = seat_of(pid);

	if (!seat)
		return;
	if (seat->mark && seat->pid != pid)
		lose(LOST_SEAT);
	seat->pid = pid;
	seat->who = who;
	seat->mark = bpf_ktime_get_ns();
}

/* sched_waking(struct task_struct *p): p sleeps, or was about to, which still goes on where it is both queued and on a CPU */
int on_waking(u64 *ctx)
{
	u64 task = ctx[0];
	u32 who = doer();

	if (FIELD(u32, task, ON_CPU) && FIELD(u32, task, ON_RQ))
		return count(task, who, 0);
	remember(task, who);
	return 0;
}

/* sched_wakeup_new(struct task_struct *p), in the task that made it */
int on_new(u64 *ctx)
{
	remember(ctx[0], doer());
	return 0;
}

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
int on_switch(u64 *ctx)
{
	u64 next = ctx[2], now, since;
	u32 pid = FIELD(u32, next, PID);
	struct seat *seat = seat_of(pid);

	if (!seat || seat->pid != pid || !seat->mark)
		return 0;
	since = seat->mark;
	seat->mark = 0;
	now = bpf_ktime_get_ns();
	return now < since ? lose(LOST_BACKWARDS) : count(next, seat->who, now - since);
}

/* softirq_raise(unsigned int vec_nr), with interrupts off */
int on_raise(u64 *ctx)
{
	struct receiving *here = receiving();
	u32 who;

	if ((u32)ctx[0] != NET_RX || !here)
		return 0;
	who = here->now == NOBODY ? doer() : INTERRUPT;
	here->asked = here->asked == NOBODY || here->asked == who ? who : INTERRUPT;
	return 0;
}

/* softirq_entry(unsigned int vec_nr) */
int on_softirq(u64 *ctx)
{
	struct receiving *here = receiving();

	if ((u32)ctx[0] == NET_RX && here) {
		here->now = here->asked;
		here->asked = NOBODY;
	}
	return 0;
}

/* softirq_exit(unsigned int vec_nr) */
int on_softirq_end(u64 *ctx)
{
	struct receiving *here = receiving();

	if ((u32)ctx[0] == NET_RX && here)
		here->now = NOBODY;
	return 0;
}
