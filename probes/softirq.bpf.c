/*
 * Time per CPU in each kind of softirq, the kernel's deferred interrupt work: from softirq_entry to softirq_exit. Softirqs do
 * not nest on a CPU, so one timestamp per CPU is enough. `since` is 0 until the first softirq_entry after the probe is loaded.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments, typed or not.
 */
#ifdef SOFTIRQ_OF_TASK
#error this kernel is a PREEMPT_RT one, where a softirq may be preempted by another one of its CPU
#endif

struct times {
	u64 since;
	u64 ns[VECTORS];
};
BPF_PERCPU_ARRAY(softirq, struct times, 1);

/* softirq_entry(unsigned int vec_nr) */
int on_entry(u64 *ctx)
{
	u32 only = 0;
	struct times *times = softirq.lookup(&only);

	if (times)
		times->since = bpf_ktime_get_ns();
	return 0;
}

/* softirq_exit(unsigned int vec_nr) */
int on_exit(u64 *ctx)
{
	u32 only = 0, vector = ctx[0];
	struct times *times = softirq.lookup(&only);

	if (times && times->since && vector < VECTORS)
		times->ns[vector] += bpf_ktime_get_ns() - times->since;
	return 0;
}
