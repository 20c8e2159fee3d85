/*
 * What the tasks of each cgroup send and receive on TCP and UDP sockets.
 *
 * Bytes are the results of the calls: sock_send_length and sock_recv_length run in the calling task; kernels without them
 * (BY_CALL) are probed at the return of the send and receive functions of both protocol families. Segments and retransmits
 * are the socket's own counters in struct tcp_sock: at each call, at a retransmit and at the end of the connection, their
 * growth since the previous reading goes to the cgroup that called last. The previous reading is kept by the socket's
 * address in `flows`, which drops the least recently used socket when it is full.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments.
 */
#include "per_cgroup.bpf.h"

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define MSG_PEEK 0x2
#define MSG_ERRQUEUE 0x2000
#define TCP_ESTABLISHED 1
#define TCP_SYN_SENT 2
#define TCP_SYN_RECV 3
#define TCP_CLOSE 7

enum { SENT, RECEIVED };

struct traffic {
	u64 tcp_bytes[2], tcp_packets[2], udp_bytes[2], udp_packets[2];
	u64 retransmits;
};
BPF_PERCPU_ARRAY(sockets, struct traffic, CGROUP_SLOTS);

struct segments {
	u32 out, in, retransmits;
};

/* A socket's counters at the previous reading, and the cgroup that called last; tag 0: no cgroup has called yet. */
struct flow {
	u64 tag;
	u32 cgroup_slot;
	struct segments last;
};
BPF_TABLE("lru_hash", u64, struct flow, flows, FLOWS);

#ifdef TYPED
static u64 (*tcp_of)(u64 sock) = (void *)BPF_FUNC_skc_to_tcp_sock;
#else
#define tcp_of(sock) (sock)
#endif

static __always_inline struct segments segments_of(u64 tcp)
{
	return (struct segments){
		.out = FIELD(u32, tcp, SEGS_OUT),
		.in = FIELD(u32, tcp, SEGS_IN),
		.retransmits = FIELD(u32, tcp, TOTAL_RETRANS),
	};
}

/*
 * Add the growth of the socket's counters. They wrap around at 2^32, and so does the subtraction. Where two tasks read the
 * counters of one socket at the same time, the later one with the older value must not count backwards. Both may count the
 * same growth: an atomic exchange per counter would cost every call more than that error matters.
 */
static __always_inline void account(struct traffic *traffic, struct flow *flow, struct segments now)
{
	s32 out = now.out - flow->last.out, in = now.in - flow->last.in, retransmits = now.retransmits - flow->last.retransmits;

	if (out > 0) {
		traffic->tcp_packets[SENT] += out;
		flow->last.out = now.out;
	}
	if (in > 0) {
		traffic->tcp_packets[RECEIVED] += in;
		flow->last.in = now.in;
	}
	if (retransmits > 0) {
		traffic->retransmits += retransmits;
		flow->last.retransmits = now.retransmits;
	}
}

static __always_inline void track_flow(u64 sock, u64 tag, u32 cgroup_slot, struct segments last)
{
	struct flow flow = {.tag = tag, .cgroup_slot = cgroup_slot, .last = last};

	flows.update(&sock, &flow);
}

/* Count a call of the current task that moved `bytes`; for TCP these may be 0 or an error although the counters have grown. */
static __always_inline int moved(u64 sock, s32 bytes, u32 way)
{
	u16 family = FIELD(u16, sock, SK_FAMILY), protocol = FIELD(u16, sock, SK_PROTOCOL);
	struct traffic *traffic;
	struct flow *flow;
	u64 group, tag, tcp;
	u32 cgroup_slot;

	if (family != AF_INET && family != AF_INET6)
		return 0;
	if (protocol != IPPROTO_TCP && (protocol != IPPROTO_UDP || bytes < 0))
		return 0;
	group = FIELD(u64, CURRENT(), TASK_GROUP);
	cgroup_slot = cgroup_slot_of(group);
	traffic = sockets.lookup(&cgroup_slot);
	if (!traffic)
		return count_lost(LOST_FULL);
	if (protocol == IPPROTO_UDP) {
		traffic->udp_bytes[way] += bytes;
		traffic->udp_packets[way]++;
		return 0;
	}
	if (bytes > 0)
		traffic->tcp_bytes[way] += bytes;
	tcp = tcp_of(sock);
	if (!tcp)
		return 0;
	tag = tag_of(group);
	flow = flows.lookup(&sock);
	if (!flow) {
		track_flow(sock, tag, cgroup_slot, segments_of(tcp));
		return 0;
	}
	account(traffic, flow, segments_of(tcp));
	flow->tag = tag;
	flow->cgroup_slot = cgroup_slot;
	return 0;
}

#ifndef BY_CALL
/* sock_send_length(struct sock *sk, int ret, int flags) */
int on_send(u64 *ctx)
{
	return moved(ctx[0], ctx[1], SENT);
}

/* sock_recv_length(struct sock *sk, int ret, int flags); peeking and reads of the error queue receive nothing */
int on_receive(u64 *ctx)
{
	return (u32)ctx[2] & (MSG_PEEK | MSG_ERRQUEUE) ? 0 : moved(ctx[0], ctx[1], RECEIVED);
}
#else
/* inet_sendmsg(struct socket *sock, struct msghdr *msg, size_t size), inet6_sendmsg and what it returns */
int on_send(u64 *ctx)
{
	return moved(FIELD(u64, ctx[0], SOCKET_SK), ctx[3], SENT);
}

/* inet_recvmsg(struct socket *sock, struct msghdr *msg, size_t size, int flags), inet6_recvmsg and what it returns */
int on_receive(u64 *ctx)
{
	return (u32)ctx[3] & (MSG_PEEK | MSG_ERRQUEUE) ? 0 : moved(FIELD(u64, ctx[0], SOCKET_SK), ctx[4], RECEIVED);
}
#endif

/* Count for the cgroup that called last, not for the current task's, if it still has the same slot. */
static __always_inline struct flow *account_flow(u64 sock, u64 tcp)
{
	struct flow *flow = flows.lookup(&sock);
	struct traffic *traffic;
	u32 cgroup_slot;
	u64 *tag_in_slot;

	if (!flow || !flow->tag)
		return flow;
	cgroup_slot = flow->cgroup_slot;
	tag_in_slot = tags_by_slot.lookup(&cgroup_slot);
	traffic = sockets.lookup(&cgroup_slot);
	if (tag_in_slot && *tag_in_slot == flow->tag && traffic)
		account(traffic, flow, segments_of(tcp));
	return flow;
}

/* tcp_retransmit_skb(const struct sock *sk, const struct sk_buff *skb, ...) */
int on_retransmit(u64 *ctx)
{
	u64 tcp = tcp_of(ctx[0]);

	if (tcp)
		account_flow(ctx[0], tcp);
	return 0;
}

/*
 * inet_sock_set_state(const struct sock *sk, int oldstate, int newstate). A connection is tracked from its beginning, so that
 * its handshake counts: an outgoing one for the task that connects; an incoming one has tag 0 until a task reads or writes.
 */
int on_state(u64 *ctx)
{
	u64 sock = ctx[0], tcp, group;
	u32 before = ctx[1], after = ctx[2], cgroup_slot;
	struct segments none = {};

	if (after != TCP_CLOSE && after != TCP_SYN_SENT && (after != TCP_ESTABLISHED || before != TCP_SYN_RECV))
		return 0;
	if (FIELD(u16, sock, SK_PROTOCOL) != IPPROTO_TCP)
		return 0;
	tcp = tcp_of(sock);
	if (!tcp)
		return 0;
	if (after == TCP_CLOSE) {
		if (account_flow(sock, tcp))
			flows.delete(&sock);
	} else if (after == TCP_SYN_SENT) {
		group = FIELD(u64, CURRENT(), TASK_GROUP);
		cgroup_slot = cgroup_slot_of(group);
		if (cgroup_slot < CGROUP_SLOTS)
			track_flow(sock, tag_of(group), cgroup_slot, segments_of(tcp));
	} else {
		track_flow(sock, 0, NO_CGROUP_SLOT, none);
	}
	return 0;
}
