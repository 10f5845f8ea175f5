//! The one table of the additional commands.

use super::{Operator, capture, doctor, drain, explain, flag, local, mark, shell, simple, watch};

/// The one table of commands: dispatch, help, completions and manual page go by it.
pub(crate) const OPERATORS: &[Operator] = &[
    Operator {
        name: "watch",
        arguments: "",
        summary: "services and servers with rates, again and again",
        text: "Rates are per second, since the last look. In a terminal, q or Ctrl-C ends it and s changes the order.",
        flags: &[
            flag(
                "--interval",
                "SECONDS",
                "time between two looks; 1 if not given",
            ),
            flag("--count", "N", "end after so many looks"),
            flag(
                "--sort",
                "rate|bytes|active|name",
                "order; rate if not given",
            ),
            flag("--no-color", "", "no colours; also NO_COLOR"),
        ],
        run: watch::run,
    },
    Operator {
        name: "explain",
        arguments: "tcp|udp|sctp SRC:PORT VIP:PORT",
        summary: "what would become of a new packet, and why",
        text: "Tells the mark, the service, the connection or the template that decides, the slot of a hash table, the servers and why each may or may not be chosen. Nothing changes.",
        flags: &[
            flag(
                "--mark",
                "N",
                "the packet has this firewall mark; if not given, the rules decide (lvsadm mark)",
            ),
            flag(
                "--interface",
                "NAME",
                "it comes in on this interface, for rules that ask",
            ),
        ],
        run: explain::run,
    },
    Operator {
        name: "drain",
        arguments: "SERVICE SERVER",
        summary: "take a server out of service without breaking connections",
        text: "Sets the weight to 0, waits until the last connection has ended and tells how many are left. SERVICE is VIP:PORT (TCP), tcp:VIP:PORT, udp:VIP:PORT, sctp:VIP:PORT or fwmark:N. Interrupted, the server keeps weight 0. With --undo the old weight returns when the deadline has passed.",
        flags: &[
            flag(
                "--deadline",
                "TIME",
                "give up after 90, 90s, 10m or 1h; exit status 1",
            ),
            flag(
                "--active",
                "",
                "do not wait for connections that are closing (InActConn)",
            ),
            flag("--delete", "", "delete the server when it is empty"),
            flag("--undo", "", "restore the weight if the deadline passes"),
        ],
        run: drain::run,
    },
    Operator {
        name: "drops",
        arguments: "",
        summary: "packets that were dropped or left to the host, by reason",
        text: "Each reason with its count and what to do about it.",
        flags: &[flag("--all", "", "reasons that never occurred, too")],
        run: simple::drops,
    },
    Operator {
        name: "sysctl",
        arguments: "[NAME[=VALUE]]",
        summary: "read or write the settings that the kernel has as net.ipv4.vs.*",
        text: "Without a name, all of them.",
        flags: &[],
        run: simple::sysctl,
    },
    Operator {
        name: "mark",
        arguments: "list | add | del N",
        summary: "the rules that give packets firewall marks",
        text: "The first rule that fits a packet decides. A service with that mark (-f) then takes it, so that one service has several ports or addresses.",
        flags: &[
            flag("--destination", "NETWORK", "where the packets go; required"),
            flag("--source", "NETWORK", "where they come from"),
            flag("--interface", "NAME", "the interface that they come in on"),
            flag(
                "--protocol",
                "tcp|udp|sctp",
                "their protocol; all three if not given",
            ),
            flag("--ports", "LIST", "destination ports: 80,443,8000-8010"),
            flag("--mark", "N", "they get this mark"),
            flag("--drop", "", "they are dropped"),
            flag("--host", "", "they are left to the host"),
            flag(
                "--position",
                "N",
                "where in the list; at its end if not given",
            ),
        ],
        run: mark::run,
    },
    Operator {
        name: "local",
        arguments: "[list | add ADDRESS... | del ADDRESS... | hairpin on|off]",
        summary: "the local addresses that stand for clients with full NAT",
        text: "Servers added with --fullnat see one of these addresses in place of the client and answer to it, so that their gateway may be anything. An address that the host does not have is answered for by the engine. Each brings 64,512 connections for each server. With hairpin on, NAT (-m) does the same for clients whose answers would not come back here: those on a server's own network, and servers of the same service.",
        flags: &[],
        run: local::run,
    },
    Operator {
        name: "capture",
        arguments: "[FILTER]",
        summary: "packets as they arrive, with the director's verdict, as pcapng",
        text: "FILTER is any of: tcp, udp, icmp, sctp, host ADDRESS, port N, dropped; all must hold. The verdict is each packet's comment (frame.comment in tshark and Wireshark). Ctrl-C ends it.",
        flags: &[
            flag("-w", "FILE", "where to write; - is standard output"),
            flag("-c", "N", "end after so many packets"),
        ],
        run: capture::run,
    },
    Operator {
        name: "doctor",
        arguments: "",
        summary: "look for what is wrong with this host and the real servers",
        text: "Each finding comes with its cure. The exit status is 1 if there are any.",
        flags: &[],
        run: doctor::run,
    },
    Operator {
        name: "completions",
        arguments: "bash|zsh|fish",
        summary: "print completions for a shell",
        text: "For example: lvsadm completions bash > /etc/bash_completion.d/lvsadm",
        flags: &[],
        run: shell::completions,
    },
    Operator {
        name: "man",
        arguments: "",
        summary: "print the manual page",
        text: "For example: lvsadm man > /usr/local/share/man/man8/lvsadm.8",
        flags: &[],
        run: shell::man,
    },
];
