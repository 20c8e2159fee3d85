/*
 * What the tasks of each cgroup send and receive on TCP and UDP sockets.
 *
 * Bytes are what the calls returned: sock_send_length and sock_recv_length run in the task that called, and where the kernel
 * does not have them (BY_CALL), the functions of both protocol families that do the work are seen to return. Segments and
 * retransmits are the socket's own counters in struct tcp_sock: at each call, at a retransmit and at the end of the
 * connection, what they have grown by since the last look goes to the cgroup that called last. What a look found is
 * remembered by the socket's address in `flows`, which drops the socket that was quiet for longest when it is full.
 *
 * One signature serves all: the context of a raw tracepoint is the array of its arguments.
 */
#include "common.bpf.h"

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
BPF_PERCPU_ARRAY(sockets, struct traffic, PLACES);

struct segments {
	u32 out, in, again;
};

/* A socket's counters at the last look, and whose task it was; a tag of 0 is nobody's yet. */
struct flow {
	u64 tag;
	u32 place;
	struct segments seen;
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
		.again = FIELD(u32, tcp, TOTAL_RETRANS),
	};
}

/*
 * Count what the socket's counters have grown by. They wrap around at 2^32, and so does the subtraction. Where two tasks look
 * at one socket at the same time, the one that comes second with the older number must not count backwards; that both count the
 * same growth is left possible, because an exchange for each counter would cost every call more than it is worth.
 */
static __always_inline void account(struct traffic *traffic, struct flow *flow, struct segments now)
{
	s32 out = now.out - flow->seen.out, in = now.in - flow->seen.in, again = now.again - flow->seen.again;

	if (out > 0) {
		traffic->tcp_packets[SENT] += out;
		flow->seen.out = now.out;
	}
	if (in > 0) {
		traffic->tcp_packets[RECEIVED] += in;
		flow->seen.in = now.in;
	}
	if (again > 0) {
		traffic->retransmits += again;
		flow->seen.again = now.again;
	}
}

static __always_inline void remember(u64 sock, u64 tag, u32 place, struct segments seen)
{
	struct flow flow = {.tag = tag, .place = place, .seen = seen};

	flows.update(&sock, &flow);
}

/* A call of the current task that moved `bytes`; for TCP they may be 0 or an error, and the counters have grown even so. */
static __always_inline int moved(u64 sock, s32 bytes, u32 way)
{
	u16 family = FIELD(u16, sock, SK_FAMILY), protocol = FIELD(u16, sock, SK_PROTOCOL);
	struct traffic *traffic;
	struct flow *flow;
	u64 group, tag, tcp;
	u32 place;

	if (family != AF_INET && family != AF_INET6)
		return 0;
	if (protocol != IPPROTO_TCP && (protocol != IPPROTO_UDP || bytes < 0))
		return 0;
	group = FIELD(u64, CURRENT(), TASK_GROUP);
	place = place_of(group);
	traffic = sockets.lookup(&place);
	if (!traffic)
		return lose(LOST_FULL);
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
		remember(sock, tag, place, segments_of(tcp));
		return 0;
	}
	account(traffic, flow, segments_of(tcp));
	flow->tag = tag;
	flow->place = place;
	return 0;
}

#ifndef BY_CALL
/* sock_send_length(struct sock *sk, int ret, int flags) */
int on_send(u64 *ctx)
{
	return moved(ctx[0], ctx[1], SENT);
}

/* sock_recv_length(struct sock *sk, int ret, int flags); a look at the data or at the error queue receives nothing */
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

/* Count for the cgroup that called last, whoever runs now, if it still has the place that it had then. */
static __always_inline struct flow *settle(u64 sock, u64 tcp)
{
	struct flow *flow = flows.lookup(&sock);
	struct traffic *traffic;
	u32 place;
	u64 *owner;

	if (!flow || !flow->tag)
		return flow;
	place = flow->place;
	owner = owners.lookup(&place);
	traffic = sockets.lookup(&place);
	if (owner && *owner == flow->tag && traffic)
		account(traffic, flow, segments_of(tcp));
	return flow;
}

/* tcp_retransmit_skb(const struct sock *sk, const struct sk_buff *skb, ...) */
int on_retransmit(u64 *ctx)
{
	u64 tcp = tcp_of(ctx[0]);

	if (tcp)
		settle(ctx[0], tcp);
	return 0;
}

/*
 * inet_sock_set_state(const struct sock *sk, int oldstate, int newstate). A connection is known from its beginning, so that
 * its handshake counts: going out, in the task that connects; coming in, with nobody's tag until somebody reads or writes.
 */
int on_state(u64 *ctx)
{
	u64 sock = ctx[0], tcp, group;
	u32 before = ctx[1], after = ctx[2], place;
	struct segments none = {};

	if (after != TCP_CLOSE && after != TCP_SYN_SENT && (after != TCP_ESTABLISHED || before != TCP_SYN_RECV))
		return 0;
	if (FIELD(u16, sock, SK_PROTOCOL) != IPPROTO_TCP)
		return 0;
	tcp = tcp_of(sock);
	if (!tcp)
		return 0;
	if (after == TCP_CLOSE) {
		if (settle(sock, tcp))
			flows.delete(&sock);
	} else if (after == TCP_SYN_SENT) {
		group = FIELD(u64, CURRENT(), TASK_GROUP);
		place = place_of(group);
		if (place < PLACES)
			remember(sock, tag_of(group), place, segments_of(tcp));
	} else {
		remember(sock, 0, NO_PLACE, none);
	}
	return 0;
}
