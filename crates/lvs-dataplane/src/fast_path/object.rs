//! Reads the compiled BPF programs from a 64-bit ELF file.

use lvs_sys::Instruction;

/// A BPF program, and the instructions that need the descriptors of maps.
#[derive(Debug)]
pub(crate) struct Code {
    pub(super) instructions: Vec<Instruction>,
    /// The index of each instruction that loads a map's descriptor, and the name of the map.
    pub(super) maps: Vec<(usize, String)>,
}

/// Length of an instruction in bytes.
const INSTRUCTION: usize = 8;
/// `SHT_SYMTAB`.
const SYMBOLS: u32 = 2;
/// `SHT_REL`.
const RELOCATIONS: u32 = 9;
/// `BPF_PSEUDO_MAP_FD` in the source register of a 64-bit load: the immediate is the descriptor of
/// a map.
const MAP: u8 = 1 << 4;

struct Section<'a> {
    name: u32,
    kind: u32,
    link: u32,
    info: u32,
    bytes: &'a [u8],
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn word16(bytes: &[u8], at: usize) -> Option<usize> {
    number(bytes, at).map(u16::from_le_bytes).map(usize::from)
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    number(bytes, at).map(u32::from_le_bytes)
}

fn word64(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(number(bytes, at)?)).ok()
}

fn text(table: &[u8], at: u32) -> Option<&str> {
    let rest = table.get(at as usize..)?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

fn sections(object: &[u8]) -> Option<(Vec<Section<'_>>, usize)> {
    if object.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let table = word64(object, 40)?;
    let (size, count, names) = (
        word16(object, 58)?,
        word16(object, 60)?,
        word16(object, 62)?,
    );
    let mut sections = Vec::with_capacity(count);
    for n in 0..count {
        let header = object.get(table + n * size..table + (n + 1) * size)?;
        let (offset, length) = (word64(header, 24)?, word64(header, 32)?);
        sections.push(Section {
            name: word32(header, 0)?,
            kind: word32(header, 4)?,
            link: word32(header, 40)?,
            info: word32(header, 44)?,
            bytes: object.get(offset..offset + length).unwrap_or_default(),
        });
    }
    Some((sections, names))
}

/// Returns the program of section `name`; `None` if the object has no such section, or is damaged.
pub(crate) fn code(object: &[u8], name: &str) -> Option<Code> {
    let (sections, names) = sections(object)?;
    let names = sections.get(names)?.bytes;
    let place = sections
        .iter()
        .position(|section| text(names, section.name) == Some(name))?;
    let instructions = sections[place]
        .bytes
        .chunks_exact(INSTRUCTION)
        .map(|bytes| Instruction {
            code: bytes[0],
            registers: bytes[1],
            offset: i16::from_le_bytes([bytes[2], bytes[3]]),
            immediate: i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        });
    let mut code = Code {
        instructions: instructions.collect(),
        maps: Vec::new(),
    };
    let relocations = sections
        .iter()
        .filter(|section| section.kind == RELOCATIONS && section.info as usize == place);
    for section in relocations {
        let symbols = sections.get(section.link as usize)?;
        if symbols.kind != SYMBOLS {
            return None;
        }
        let strings = sections.get(symbols.link as usize)?.bytes;
        for relocation in section.bytes.chunks_exact(16) {
            let (offset, symbol) = (word64(relocation, 0)?, word32(relocation, 12)? as usize);
            let symbol = symbols.bytes.get(symbol * 24..symbol * 24 + 24)?;
            let map = text(strings, word32(symbol, 0)?)?;
            code.maps.push((offset / INSTRUCTION, map.to_owned()));
        }
    }
    Some(code)
}

impl Code {
    /// Returns the instructions with the descriptors of the maps; `None` if `map` returns no
    /// descriptor for one of the maps, or the object is damaged.
    pub(crate) fn linked(mut self, map: impl Fn(&str) -> Option<i32>) -> Option<Vec<Instruction>> {
        for (place, name) in &self.maps {
            let instruction = self.instructions.get_mut(*place)?;
            instruction.registers = instruction.registers & 0xf | MAP;
            instruction.immediate = map(name)?;
        }
        Some(self.instructions)
    }
}
