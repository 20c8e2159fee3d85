/*
 * Reading of kernel fields, and the cgroup of a task. Declares no map, so that a probe without a table per cgroup can use
 * this file alone.
 *
 * Constants come from the loader as -D macros: TYPED where the verifier knows the types of the arguments (tp_btf,
 * fentry and iterators), UNIFIED where the cpu controller is in the version 2 hierarchy, offsets of kernel fields from BTF.
 */
#ifndef DIOPTASE_KERNEL_BPF_H
#define DIOPTASE_KERNEL_BPF_H

/* Arithmetic on u64 keeps BCC's rewriter from guessing what is a kernel pointer. */
#ifdef TYPED
#define FIELD(type, base, offset) (*(type *)((base) + (offset)))
#define CURRENT() ((u64)bpf_get_current_task_btf())
#else
#define FIELD(type, base, offset)                                                      \
	({                                                                             \
		type value_ = 0;                                                       \
		bpf_probe_read_kernel(&value_, sizeof(value_), (void *)((base) + (offset))); \
		value_;                                                                \
	})
#define CURRENT() ((u64)bpf_get_current_task())
#endif

/* First argument of the probed kernel function, at its entry. */
#ifdef TYPED
#define ARGUMENT(ctx) ((ctx)[0])
#elif defined ARGUMENT_AT
#define ARGUMENT(ctx) ((ctx)[ARGUMENT_AT / 8])
#endif

#define ROOT_CGROUP_ID 1

/* Inode of a cgroup's directory. */
static __always_inline u64 id_of(u64 cgroup)
{
	u64 node = cgroup ? FIELD(u64, cgroup, CGROUP_KN) : 0;

	return node ? FIELD(u64, node, KN_ID) : ROOT_CGROUP_ID;
}

/* Inode of a task group's directory. Autogroups have no cgroup of their own and belong to the root. */
static __always_inline u64 cgroup_id_of(u64 group)
{
	return id_of(FIELD(u64, group, CSS_CGROUP));
}

#ifdef TASK_CSS_SET
/*
 * Inode of the directory that a task is in. In the version 2 hierarchy it can differ from that of its task group: a cgroup
 * without the cpu controller uses the task group of its nearest ancestor that has it.
 */
static __always_inline u64 cgroup_id_of_task(u64 task)
{
#ifdef UNIFIED
	u64 set = FIELD(u64, task, TASK_CSS_SET);

	return id_of(FIELD(u64, set, CSS_SET_CGROUP));
#else
	return cgroup_id_of(FIELD(u64, task, TASK_GROUP));
#endif
}
#endif

#endif
