//! Writes pcapng files, as far as packets with comments need it.

use std::io::{self, Write};

/// Link type of Ethernet frames.
pub(super) const ETHERNET: u16 = 1;
/// Link type of IP packets without a link-layer header.
pub(super) const RAW: u16 = 101;

pub(super) struct Writer<W> {
    out: W,
    interfaces: Vec<String>,
}

impl<W: Write> Writer<W> {
    /// Writes the header of a new section.
    pub(super) fn new(mut out: W) -> io::Result<Self> {
        let mut body = Vec::new();
        body.extend(0x1a2b_3c4d_u32.to_le_bytes());
        body.extend(1u16.to_le_bytes());
        body.extend(0u16.to_le_bytes());
        // The length of the section is unknown.
        body.extend(u64::MAX.to_le_bytes());
        option(
            &mut body,
            4,
            concat!("lvsadm ", env!("CARGO_PKG_VERSION")).as_bytes(),
        );
        end_of_options(&mut body);
        block(&mut out, 0x0a0d_0d0a, &body)?;
        Ok(Self {
            out,
            interfaces: Vec::new(),
        })
    }

    pub(super) fn packet(
        &mut self,
        interface: &str,
        link: u16,
        time_us: u64,
        frame: &[u8],
        comment: &str,
    ) -> io::Result<()> {
        let number = match self.interfaces.iter().position(|name| name == interface) {
            Some(number) => number,
            None => {
                let mut body = Vec::new();
                body.extend(link.to_le_bytes());
                body.extend(0u16.to_le_bytes());
                // The length of packets is not limited.
                body.extend(0u32.to_le_bytes());
                option(&mut body, 2, interface.as_bytes());
                end_of_options(&mut body);
                block(&mut self.out, 1, &body)?;
                self.interfaces.push(interface.to_owned());
                self.interfaces.len() - 1
            }
        };
        let mut body = Vec::new();
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        body.extend(u32::try_from(number).unwrap_or(0).to_le_bytes());
        let [high, low] = [time_us >> 32, time_us & u64::from(u32::MAX)];
        for half in [high, low] {
            body.extend(u32::try_from(half).unwrap_or(0).to_le_bytes());
        }
        body.extend(len.to_le_bytes());
        body.extend(len.to_le_bytes());
        body.extend(frame);
        pad(&mut body);
        option(&mut body, 1, comment.as_bytes());
        end_of_options(&mut body);
        block(&mut self.out, 6, &body)?;
        // The file may be read while it grows, and the capture may be interrupted.
        self.out.flush()
    }
}

fn pad(body: &mut Vec<u8>) {
    while !body.len().is_multiple_of(4) {
        body.push(0);
    }
}

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    body.extend(code.to_le_bytes());
    body.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_le_bytes());
    body.extend(value);
    pad(body);
}

fn end_of_options(body: &mut Vec<u8>) {
    body.extend([0; 4]);
}

fn block(out: &mut impl Write, kind: u32, body: &[u8]) -> io::Result<()> {
    let len = u32::try_from(body.len() + 12).map_err(io::Error::other)?;
    let mut block = Vec::with_capacity(body.len() + 12);
    block.extend(kind.to_le_bytes());
    block.extend(len.to_le_bytes());
    block.extend(body);
    block.extend(len.to_le_bytes());
    out.write_all(&block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pcapng_blocks_are_complete_and_each_interface_is_described_once() {
        let mut file = Vec::new();
        {
            let mut writer = Writer::new(&mut file).expect("the header can be written");
            for interface in ["eth0", "eth1", "eth0"] {
                writer
                    .packet(
                        interface,
                        ETHERNET,
                        1 << 40 | 5,
                        &[1, 2, 3, 4, 5],
                        "dropped",
                    )
                    .expect("the packet can be written");
            }
        }
        let mut kinds = Vec::new();
        let mut rest = &file[..];
        while !rest.is_empty() {
            let word = |at: usize| {
                u32::from_le_bytes(
                    rest[at..at + 4]
                        .try_into()
                        .expect("the slice has four bytes"),
                )
            };
            let len = word(4) as usize;
            assert_eq!((len % 4, word(len - 4) as usize), (0, len));
            kinds.push(word(0));
            rest = &rest[len..];
        }
        assert_eq!(kinds, [0x0a0d_0d0a, 1, 6, 1, 6, 6]);
    }
}
