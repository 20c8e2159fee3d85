/*
 * Split of run-queue waits by the cgroups that ran meanwhile: an addition to runqlat.bpf.c if the loader defines BLAME.
 *
 * Each CPU keeps its latest SPANS spans (a power of two): since when which cgroup, a higher scheduling class or the idle task
 * ran there. Consecutive tasks of one cgroup share a span, and a span ends where the next begins, so a switch within a cgroup
 * writes nothing. Older spans are condensed: those shorter than 1 ms are added up in stretches of up to 8 ms by cgroup, so
 * that cgroups that alternate 100,000 times a second do not displace the history; longer spans become stretches of their own.
 *
 * When a task that has waited is switched in, spans and then stretches are walked back over its wait, and every overlap is
 * added to the pair of the waiting and the running cgroup. All times are on the run queue's own clock, which also measures
 * the wait: the parts of a wait add up to the wait, to the nanosecond. Only a stretch of several spans in which a wait began
 * is split by proportion, because the order of its spans is not stored. If a waiting task is moved to another CPU, the part
 * until then is split at that moment by the timeline of the CPU that it leaves.
 *
 * The cgroup's own quota: cfs_rq.throttled_clock_self has the time since which the group, or one above it, is throttled on this
 * CPU, and throttled_clock_self_time the total (677ea015f231, Linux 6.6). The first is stored when a task of the group leaves
 * the CPU; the growth of the second when one returns gives the end of the throttle. The time between them is not attributed to
 * other cgroups. Only the latest throttle is known. Since Linux 6.18 (BY_TASK) a wait contains at most one throttle, because
 * each task is throttled by itself, on its way to user space: a task that is switched in while its group is throttled was not
 * throttled, and has waited for the tasks that ran. If a group was throttled without leaving the CPU (before 6.18, when a
 * sibling used up their parent's quota), the length is exact, and the throttle is assumed to have ended with the wait; the
 * first throttle of a group on a CPU is attributed to the running cgroups, because its length is not known. Before Linux 6.6
 * there is only throttle_count: a throttle is then assumed to end when the group's first task returns.
 */
#ifndef DIOPTASE_BLAME_BPF_H
#define DIOPTASE_BLAME_BPF_H

#include "cgroup_pairs.bpf.h"

/* A wait on one CPU of a task whose group has this tag and slot. */
struct waited {
	u64 tag, cfs_rq, begin, end;
	u32 cgroup_slot;
	u32 valid; /* whether the wait is counted */
};

#ifdef BLAME

#define NO_CGROUP 0ULL
#define HIGHER_CLASS 0xFFFFFFFFULL
#define STRETCH_NS (1ULL << 23)
#define LONG_NS (1ULL << 20)
#define MAX_RT_PRIO 100 /* below it are real-time, deadline and stop tasks, and those that inherit from them */

struct span {
	u64 since;
	u64 runner;
};
/* Older spans by runner, at most SHARES of them; a stretch ends where the next one begins, the latest at the oldest span. */
#define SHARES 4
struct stretch {
	u64 since;
	struct {
		u64 runner;
		u64 ns;
	} shares[SHARES];
};
struct timeline {
	u64 head;
	u64 latest;
	u64 open; /* whether more may be added to the latest stretch */
	u64 cgroup_slot;
	u64 waits, waited_ns; /* waits that ended here, and time waited here by them and by those that were moved away */
	struct span spans[SPANS];
	struct stretch stretches[STRETCHES];
};
/* Not a per-CPU array, because the CPU that pulls a waiting task reads the timeline of the CPU on which the task waited. */
BPF_ARRAY(timelines, struct timeline, CPUS);

/* Parts of waits that are attributed to no cgroup. */
struct parts {
	u64 throttled_ns, higher_class_ns, other_ns;
};

/*
 * The latest throttle of a group on this CPU. `open_since` is the beginning of a throttle whose end is not known yet, or 0;
 * `total_ns` is the group's total throttled time at the previous reading, and `tag` the group that was read.
 */
struct last_throttle {
	u64 tag, open_since, total_ns, begin, end;
};
BPF_PERCPU_ARRAY(last_throttles, struct last_throttle, CGROUP_SLOTS);

/* Part of a task's run_delay that has been split already when it was moved, by the low bits of its pid as in `task_slots`. */
BPF_ARRAY(splits, u64, TASK_SLOTS);

static __always_inline struct timeline *this_timeline(void)
{
	u32 cpu = bpf_get_smp_processor_id();

	return timelines.lookup(&cpu);
}

static __always_inline u64 clock_of(u64 cfs_rq)
{
	u64 rq = FIELD(u64, cfs_rq, RQ);

	return FIELD(u64, rq, RQ_CLOCK);
}

/* Since when the group is throttled on this CPU; 0 if it is not. */
static __always_inline u64 throttled_since(u64 cfs_rq)
{
#ifdef THROTTLED_SINCE
	return FIELD(u64, cfs_rq, THROTTLED_SINCE);
#elif defined THROTTLE_COUNT
	return FIELD(u32, cfs_rq, THROTTLE_COUNT) ? clock_of(cfs_rq) : 0;
#else
	return 0;
#endif
}

/* Total time that the group was throttled on this CPU, without a throttle that still lasts. */
static __always_inline u64 throttled_ns(u64 cfs_rq)
{
#ifdef THROTTLED_NS
	return FIELD(u64, cfs_rq, THROTTLED_NS);
#else
	return 0;
#endif
}

/*
 * Reset the entry if it belongs to another cgroup: time that the group was throttled before its first reading here is no part
 * of any wait. Without a branch, because the verifier would walk everything behind it twice: `same` is all ones if the tags
 * are equal, else 0.
 */
static __always_inline void forget_other_cgroup(struct last_throttle *throttle, u64 tag, u64 total)
{
#ifdef THROTTLED_NS
	u64 differs = throttle->tag ^ tag, same;

	asm volatile("" : "+r"(differs));
	same = ~(u64)((s64)(differs | -differs) >> 63);
	asm volatile("" : "+r"(same));
	throttle->tag = tag;
	throttle->open_since &= same;
	throttle->begin &= same;
	throttle->end &= same;
	throttle->total_ns = (throttle->total_ns & same) | (total & ~same);
#endif
}

/* A task leaves this CPU, maybe because its group is throttled. */
static __always_inline void on_leave_cpu(u64 task)
{
	u64 cfs_rq = FIELD(u64, task, CFS_RQ), since = throttled_since(cfs_rq);
	struct timeline *line = this_timeline();
	struct last_throttle *throttle;
	u32 cgroup_slot;

	if (!since || !line)
		return;
	cgroup_slot = line->cgroup_slot;
	throttle = last_throttles.lookup(&cgroup_slot);
	if (!throttle)
		return;
	forget_other_cgroup(throttle, tag_of(FIELD(u64, task, TASK_GROUP)), throttled_ns(cfs_rq));
	throttle->open_since = since;
}

/* Add a span that is about to be overwritten to the latest stretch, or begin a new stretch with it. */
static __always_inline void add_to_stretch(struct timeline *line, struct span *span, u64 until)
{
	struct stretch *into = &line->stretches[line->latest & (STRETCHES - 1)];
	u64 ns = until - span->since;
	u32 nth;

	if (!span->since || !ns)
		return;
	if (line->open && ns < LONG_NS && span->since - into->since < STRETCH_NS) {
#pragma unroll
		for (nth = 0; nth < SHARES; nth++) {
			if (into->shares[nth].ns && into->shares[nth].runner != span->runner)
				continue;
			into->shares[nth].runner = span->runner;
			into->shares[nth].ns += ns;
			return;
		}
	}
	line->open = ns < LONG_NS;
	line->latest++;
	into = &line->stretches[line->latest & (STRETCHES - 1)];
	__builtin_memset(into, 0, sizeof(*into));
	into->since = span->since;
	into->shares[0].runner = span->runner;
	into->shares[0].ns = ns;
}

static __always_inline struct timeline *begin_span(u64 now, u64 runner, u32 cgroup_slot)
{
	struct timeline *line = this_timeline();
	struct span *span;

	if (!line)
		return NULL;
	line->cgroup_slot = cgroup_slot;
	if (line->spans[line->head & (SPANS - 1)].runner == runner)
		return line;
	line->head++;
	span = &line->spans[line->head & (SPANS - 1)];
	add_to_stretch(line, span, line->spans[(line->head + 1) & (SPANS - 1)].since);
	span->since = now;
	span->runner = runner;
	return line;
}

static __always_inline void on_idle_in(u64 idle)
{
	begin_span(clock_of(FIELD(u64, idle, CFS_RQ)), NO_CGROUP, NO_CGROUP_SLOT);
}

static __always_inline void on_task_in(u64 task, struct waited *wait)
{
	s32 prio = FIELD(s32, task, PRIO);
	struct timeline *line = begin_span(wait->end, prio < MAX_RT_PRIO ? HIGHER_CLASS : (u32)wait->tag, wait->cgroup_slot);

	if (!line || !wait->valid)
		return;
	line->waits++;
	line->waited_ns += wait->end - wait->begin;
}

/* The throttle, as `begin` and `end`, that this wait may overlap. */
static __always_inline struct last_throttle throttle_of(struct waited *wait)
{
	u64 since = throttled_since(wait->cfs_rq), total = throttled_ns(wait->cfs_rq);
	struct last_throttle none = {}, *throttle;
	u32 cgroup_slot = wait->cgroup_slot;

#ifdef THROTTLED_NS
	if (!since && !total)
		return none;
#endif
#ifndef BY_TASK
	if (since) { /* The group is still throttled; the task is switched in to finish its work in the kernel. */
		none.begin = since;
		none.end = wait->end;
		return none;
	}
#endif
	throttle = last_throttles.lookup(&cgroup_slot);
	if (!throttle)
		return none;
	forget_other_cgroup(throttle, wait->tag, total);
#ifdef THROTTLED_NS
	if (total != throttle->total_ns) {
		throttle->begin = throttle->open_since ? throttle->open_since : wait->end - (total - throttle->total_ns);
		throttle->end = throttle->begin + (total - throttle->total_ns);
		throttle->total_ns = total;
		throttle->open_since = 0;
	}
#else
	if (throttle->open_since) {
		throttle->begin = throttle->open_since;
		throttle->end = wait->end;
		throttle->open_since = 0;
	}
#endif
	return *throttle;
}

/* Length of the overlap of a time range with the throttle. */
static __always_inline u64 throttled_within(struct last_throttle *throttle, u64 from, u64 until)
{
	if (from < throttle->begin)
		from = throttle->begin;
	if (until > throttle->end)
		until = throttle->end;
	return until > from ? until - from : 0;
}

static __always_inline void add_pair(struct parts *parts, u64 key, u64 ns)
{
	struct pair *pair = pair_of(key);

	if (pair)
		pair->ns += ns;
	else
		parts->other_ns += ns;
}

static __always_inline void attribute(struct parts *parts, struct waited *wait, u64 runner, u64 ns)
{
	if (runner == NO_CGROUP)
		parts->other_ns += ns;
	else if (runner == HIGHER_CLASS)
		parts->higher_class_ns += ns;
	else if (ns)
		add_pair(parts, wait->tag << 32 | runner, ns);
}

/* Split the part of a wait before `end` by stretches. Time before the oldest stretch is other_ns. */
static __always_inline void split_older(struct parts *parts, struct waited *wait, struct timeline *line,
					struct last_throttle *throttle, u64 end)
{
	u64 latest = line->latest, from, left, length, ratio, ns;
	struct stretch *stretch;
	u32 back, nth;

#pragma clang loop unroll(disable)
	for (back = 0; back < STRETCHES && end != wait->begin; back++) {
		stretch = &line->stretches[(latest - back) & (STRETCHES - 1)];
		if (!stretch->since || stretch->since >= end)
			break;
		from = stretch->since > wait->begin ? stretch->since : wait->begin;
		length = end - stretch->since;
		left = end - from - throttled_within(throttle, from, end);
		ratio = (left << 16) / length;
#pragma clang loop unroll(disable)
		for (nth = 0; nth < SHARES; nth++) {
			ns = stretch->shares[nth].ns * ratio >> 16;
			attribute(parts, wait, stretch->shares[nth].runner, ns);
			left -= ns;
		}
		parts->other_ns += left;
		end = from;
	}
	parts->other_ns += end - wait->begin - throttled_within(throttle, wait->begin, end);
}

/* Split a wait among the runners of the timeline's CPU, as far back as there are spans; returns the end of the rest. */
static __always_inline u64 split(struct parts *parts, struct waited *wait, struct timeline *line,
				 struct last_throttle *throttle)
{
	u64 head = line->head, from, end = wait->end;
	struct span *span;
	u32 back;

#pragma clang loop unroll(disable)
	for (back = 0; back < SPANS && end != wait->begin; back++) {
		span = &line->spans[(head - back) & (SPANS - 1)];
		from = span->since > wait->begin ? span->since : wait->begin;
		attribute(parts, wait, span->runner, end - from - throttled_within(throttle, from, end));
		end = from;
	}
	return end;
}

static __always_inline void split_on_cpu(struct parts *parts, struct waited *wait)
{
	struct timeline *line = this_timeline();
	struct last_throttle throttle = throttle_of(wait);
	u64 left;

	if (!line) {
		parts->other_ns += wait->end - wait->begin;
		return;
	}
	parts->throttled_ns += throttled_within(&throttle, wait->begin, wait->end);
	left = split(parts, wait, line, &throttle);
	if (left != wait->begin)
		split_older(parts, wait, line, &throttle, left);
}

/* Part of a task's run_delay beyond `start_delay` that has been split. */
static __always_inline u64 split_before(u32 pid, u64 start_delay, u64 delay)
{
	u32 at = pid & (TASK_SLOTS - 1);
	u64 *until = splits.lookup(&at);

	return until && *until > start_delay && *until <= delay ? *until - start_delay : 0;
}

/*
 * Split the wait of a task that is moved away: `delay` is its run_delay, which was `start_delay` when it began to wait.
 * Without stretches: a second walk over them would double the verifier's time, and few waits that end by a move are so long.
 */
static __always_inline void split_on_migration(struct parts *parts, struct waited *wait, u32 pid, u64 start_delay, u64 delay)
{
	u64 rq = FIELD(u64, wait->cfs_rq, RQ);
	u32 cpu = FIELD(u32, rq, RQ_CPU), at = pid & (TASK_SLOTS - 1);
	struct timeline *line = timelines.lookup(&cpu);
	u64 *until = splits.lookup(&at);
	struct last_throttle none = {};

	if (!line || !until)
		return;
	wait->end = FIELD(u64, rq, RQ_CLOCK);
	wait->begin = wait->end - (delay - start_delay - split_before(pid, start_delay, delay));
	*until = delay;
	line->waited_ns += wait->end - wait->begin;
	parts->other_ns += split(parts, wait, line, &none) - wait->begin;
}

#else

static __always_inline void on_leave_cpu(u64 task)
{
}

static __always_inline void on_idle_in(u64 idle)
{
}

static __always_inline void on_task_in(u64 task, struct waited *wait)
{
}

#endif
#endif
