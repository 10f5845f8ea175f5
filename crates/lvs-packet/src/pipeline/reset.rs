//! TCP resets for connections of removed servers, and for segments without a connection.

use lvs_core::{Hook, Instant, Protocol, Reset};

use super::datagram::Job;
use super::{Cx, Env, Fate, Output, Pipeline};
use crate::frame::Frame;
use crate::net::Net;
use crate::parse::{self, Packet};
use crate::wire::tcp;

impl Pipeline {
    /// Sends a reset or probe that [`Shard::end_down`](lvs_core::Shard::end_down) or
    /// [`Shard::take_late_resets`](lvs_core::Shard::take_late_resets) has returned: with
    /// [`Reset::forward`], as a request of the client; otherwise, as an answer of the dataplane.
    pub fn send_reset<N: Net>(
        &mut self,
        reset: &Reset,
        env: &Env<'_, N>,
        now: Instant,
        out: &mut Output,
    ) {
        let mut cx = Cx::new(env, now, out);
        let mut frame = cx.out.spare(tcp::RESET_LEN_MAX);
        if tcp::own_reset(&mut frame, reset) {
            let fate = match (&reset.forward, parse::ip(frame.bytes(), false)) {
                (Some(forward), Ok(packet)) => {
                    // The reset is forwarded as if the client had sent it.
                    let net = env.net;
                    let (from_host, to_host) = (net.is_local(packet.src), net.is_local(packet.dst));
                    let job = Job::new(packet, Hook::Local, from_host, to_host);
                    self.forward(&mut frame, &job, forward, true, &mut cx)
                }
                _ => self.send_own(&mut frame, &mut cx),
            };
            let sent = !reset.asks && !matches!(fate, Fate::Dropped(_));
            self.counters.resets_sent += u64::from(sent);
        }
        cx.out.keep(frame);
    }

    /// Answers a segment with a reset, as a host that does not have the connection. Returns the
    /// fate of the segment; `None` if it gets no reset, for example because its checksum is wrong.
    pub(super) fn answer_with_reset<N: Net>(
        &mut self,
        frame: &Frame,
        packet: &Packet,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        if !frame.offload.is_checked()
            && !tcp::checksum_ok(frame.bytes(), packet.l4, Protocol::TCP.0)
        {
            return None;
        }
        let mut answer = cx.out.spare(tcp::RESET_LEN_MAX);
        let mut fate = None;
        if tcp::reset(&mut answer, frame.bytes(), packet.l4) {
            let sent = self.send_own(&mut answer, cx);
            self.counters.resets_sent += u64::from(sent == Fate::Answered);
            fate = Some(sent);
        }
        cx.out.keep(answer);
        fate
    }
}
