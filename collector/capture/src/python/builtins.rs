//! Strings, integers and dictionaries of the interpreter, and attributes of objects.

use crate::{
    cpython::Layout,
    memory::{ReadError, Snapshot},
};

/// Maximum number of characters of a string. Longer strings are cut.
const MAX_CHARACTERS: u64 = 1 << 16;
/// Maximum number of entries of a dictionary.
const MAX_ENTRIES: u64 = 1 << 20;
/// Type flag: attributes may be stored in the object itself.
const INLINE_VALUES: u64 = 1 << 2;
/// Type flag: the interpreter manages the dictionary of attributes.
const MANAGED_DICT: u64 = 1 << 4;
/// Bytes in a class from its name to the size of its objects.
const SIZE_AFTER_NAME: u64 = 8;
/// Bits below the number of shared references.
const SHARED_MARKS: u32 = 2;
/// PySetObject: bytes from its header to the number of places less one, and to the pointer to them;
/// in all versions.
const SET_MASK: u64 = 16;
const SET_PLACES: u64 = 24;
/// Maximum number of places of a set.
const MAX_PLACES: u64 = 1 << 16;
/// Bits of one digit of an integer.
const DIGIT_BITS: u32 = 30;

/// Lower addresses are numbers and marks instead of objects.
pub(super) const MIN_ADDRESS: u64 = 1 << 16;
/// Maximum number of bytes of the name of a class.
const MAX_NAME_BYTES: usize = 48;

/// Names of objects in errors.
const STRING: &str = "a string";
const LIST: &str = "a list";

/// The characters of a string: their address, their number, and the bytes of each.
pub(super) struct Characters {
    pub address: u64,
    pub length: u64,
    pub width: u64,
}

/// Finds the characters of a string.
pub(super) fn characters(memory: &mut Snapshot, layout: &Layout, string: u64) -> Result<Characters, ReadError> {
    let error = ReadError { what: STRING, address: string };
    let length = memory.read_u64(STRING, string.wrapping_add(layout.unicode_length))?;
    let state = memory.read_u32(STRING, string.wrapping_add(layout.unicode_state))?;
    let bit = |bit: u64| state >> bit & 1 != 0;
    let width = u64::from(state >> layout.unicode_kind_bit & 7);
    // The kind is the width. 0 is a string in the legacy format whose characters are not computed
    // yet.
    if !matches!(width, 1 | 2 | 4) || length > i64::MAX.cast_unsigned() {
        return Err(error);
    }
    let address = if !bit(layout.unicode_compact_bit) {
        memory.read_u64(STRING, string.wrapping_add(layout.unicode_data_pointer))?
    } else if bit(layout.unicode_ascii_bit) {
        string.wrapping_add(layout.unicode_ascii_data)
    } else {
        string.wrapping_add(layout.unicode_compact_data)
    };
    Ok(Characters { address, length: length.min(MAX_CHARACTERS), width })
}

/// The text of a string. Python strings may contain surrogates, which become the replacement
/// character.
pub(super) fn string(memory: &mut Snapshot, layout: &Layout, string: u64) -> Result<String, ReadError> {
    let Characters { address, length, width } = characters(memory, layout, string)?;
    let bytes = memory.bytes(STRING, address, (length * width) as usize)?;
    let character = |code: u32| char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
    Ok(match width {
        1 => bytes.iter().map(|byte| char::from(*byte)).collect(),
        2 => bytes.chunks_exact(2).map(|unit| character(u16::from_le_bytes([unit[0], unit[1]]).into())).collect(),
        _ => bytes
            .chunks_exact(4)
            .map(|unit| character(u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]])))
            .collect(),
    })
}

/// Whether a string equals this ASCII text.
fn is_text(memory: &mut Snapshot, layout: &Layout, string: u64, text: &str) -> bool {
    let Ok(found) = characters(memory, layout, string) else { return false };
    let mut bytes = [0; 32];
    let Some(bytes) = bytes.get_mut(..text.len()) else { return false };
    found.width == 1
        && found.length == text.len() as u64
        && memory.copy(found.address, bytes)
        && bytes == text.as_bytes()
}

/// A non-negative integer that fits into eight bytes.
pub(super) fn read_integer(memory: &mut Snapshot, layout: &Layout, number: u64) -> Option<u64> {
    const NUMBER: &str = "a number";
    let tag = memory.read_u64(NUMBER, number.wrapping_add(layout.long_tag)).ok()?;
    // Up to 3.11 the number of digits, negative for a negative integer. Later the lowest bits are
    // the sign, 0 for positive.
    let digits = if layout.minor >= 12 {
        match tag & 3 {
            0 => tag >> 3,
            1 => 0,
            _ => return None,
        }
    } else {
        tag
    };
    if digits > 3 {
        return None;
    }
    let mut value = 0u64;
    for index in (0..digits).rev() {
        let digit = memory.read_u32(NUMBER, number.wrapping_add(layout.long_digits + index * 4)).ok()?;
        value = value.checked_mul(1 << DIGIT_BITS)?.checked_add(digit.into())?;
    }
    Some(value)
}

/// The entries of a dictionary.
struct Entries {
    first: u64,
    count: u64,
    /// Bytes of an entry, and the offsets of key and value in it.
    size: u64,
    key: u64,
    value: u64,
    /// Address of the values if they are not in the entries.
    values: Option<u64>,
}

impl Entries {
    fn of_keys(memory: &mut Snapshot, layout: &Layout, keys: u64, values: Option<u64>) -> Result<Self, ReadError> {
        const KEYS: &str = "the keys of a dictionary";
        let error = ReadError { what: KEYS, address: keys };
        let count = memory.read_u64(KEYS, keys.wrapping_add(layout.keys_entries))?;
        let at = keys.wrapping_add(layout.keys_size);
        let (table, strings) = match layout.keys_kind {
            Some(kind) => {
                let table = 1u64.checked_shl(memory.read_u8(KEYS, at)?.into()).ok_or(error)?;
                (table, memory.read_u8(KEYS, keys.wrapping_add(kind))? != 0)
            }
            None => {
                let size = memory.read_u64(KEYS, at)?;
                let index = match size {
                    0..=0xff => 1,
                    0x100..=0xffff => 2,
                    0x1_0000..=0xffff_ffff => 4,
                    _ => 8,
                };
                (size.checked_mul(index).ok_or(error)?, false)
            }
        };
        if count > MAX_ENTRIES {
            return Err(error);
        }
        let first = keys.wrapping_add(layout.keys_indices).wrapping_add(table);
        // An entry starts with the hash of its key, unless all keys are strings, which have their
        // own hash.
        let (size, key) = if strings { (16, 0) } else { (24, 8) };
        Ok(Entries { first, count, size, key, value: key + 8, values })
    }

    fn of_dict(memory: &mut Snapshot, layout: &Layout, dict: u64) -> Result<Self, ReadError> {
        const DICT: &str = "a dictionary";
        let keys = memory.read_u64(DICT, dict.wrapping_add(layout.dict_keys))?;
        let values = memory.read_u64(DICT, dict.wrapping_add(layout.dict_values))?;
        let values = (values != 0).then(|| values.wrapping_add(layout.values_data));
        Self::of_keys(memory, layout, keys, values)
    }

    /// Key and value of an entry; `None` for a removed entry.
    fn get(&self, memory: &mut Snapshot, index: u64) -> Option<(u64, u64)> {
        const ENTRY: &str = "an entry of a dictionary";
        let entry = self.first.wrapping_add(index * self.size);
        let key = memory.read_u64(ENTRY, entry.wrapping_add(self.key)).ok()?;
        let value = match self.values {
            Some(values) => memory.read_u64(ENTRY, values.wrapping_add(index * 8)),
            None => memory.read_u64(ENTRY, entry.wrapping_add(self.value)),
        };
        value.ok().filter(|value| key != 0 && *value != 0).map(|value| (key, value))
    }
}

/// All pairs of a dictionary. It may change during the read.
pub(super) fn pairs(memory: &mut Snapshot, layout: &Layout, dict: u64) -> Result<Vec<(u64, u64)>, ReadError> {
    pairs_up_to(memory, layout, dict, MAX_ENTRIES)
}

/// All pairs of a dictionary, or none if it has more than `most` entries.
pub(super) fn pairs_up_to(
    memory: &mut Snapshot,
    layout: &Layout,
    dict: u64,
    most: u64,
) -> Result<Vec<(u64, u64)>, ReadError> {
    let entries = Entries::of_dict(memory, layout, dict)?;
    if entries.count > most {
        return Ok(Vec::new());
    }
    Ok((0..entries.count).filter_map(|index| entries.get(memory, index)).collect())
}

/// The value of a dictionary for a key that is ASCII text. The entries are searched in the order in
/// which they were added, some at a time: a process with thousands of modules imports the standard
/// library's first.
pub(super) fn item(memory: &mut Snapshot, layout: &Layout, dict: u64, key: &str) -> Result<Option<u64>, ReadError> {
    /// Number of entries that are read at once.
    const BATCH: usize = 128;
    let entries = Entries::of_dict(memory, layout, dict)?;
    for first in (0..entries.count).step_by(BATCH) {
        let batch = first..entries.count.min(first + BATCH as u64);
        let pairs = batch.filter_map(|index| entries.get(memory, index)).collect();
        let pairs = with_lengths_of(memory, layout, pairs, &[key]);
        if let Some((_, value)) = pairs.into_iter().find(|(found, _)| is_text(memory, layout, *found, key)) {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Selects the pairs whose keys are as long as one of these texts. All keys are strings. The keys
/// of a large dictionary are on many pages, and hardly any of these has to be copied. All pairs of
/// a small dictionary are returned.
fn with_lengths_of(memory: &Snapshot, layout: &Layout, pairs: Vec<(u64, u64)>, texts: &[&str]) -> Vec<(u64, u64)> {
    /// Objects of one class have the same keys, whose pages are copied once.
    const FEW_KEYS: usize = 32;
    if pairs.len() <= FEW_KEYS {
        return pairs;
    }
    let lengths: Vec<u64> = pairs.iter().map(|(key, _)| key.wrapping_add(layout.unicode_length)).collect();
    let lengths = memory.words(&lengths);
    let may_be =
        |length: &Option<u64>| length.is_none_or(|length| texts.iter().any(|text| text.len() as u64 == length));
    pairs.into_iter().zip(lengths).filter(|(_, length)| may_be(length)).map(|(pair, _)| pair).collect()
}

/// The values of the first `most` attributes of an object, without those of its class.
pub(super) fn attribute_values(
    memory: &mut Snapshot,
    layout: &Layout,
    object: u64,
    most: u64,
) -> Result<Vec<u64>, ReadError> {
    let entries = attribute_entries(memory, layout, object)?;
    Ok((0..entries.count.min(most)).filter_map(|index| Some(entries.get(memory, index)?.1)).collect())
}

/// The values of the attributes with these names of an object, without those of its class.
pub(super) fn attributes<const N: usize>(
    memory: &mut Snapshot,
    layout: &Layout,
    object: u64,
    names: [&str; N],
) -> Result<[Option<u64>; N], ReadError> {
    let entries = attribute_entries(memory, layout, object)?;
    let mut found = [None; N];
    let pairs = (0..entries.count).filter_map(|index| entries.get(memory, index)).collect();
    for (key, value) in with_lengths_of(memory, layout, pairs, &names) {
        if let Some(position) = names.iter().position(|name| is_text(memory, layout, key, name)) {
            found[position] = Some(value);
        }
    }
    Ok(found)
}

/// The class of an object. `None` if there is no living object at the address.
pub(super) fn class_of(memory: &mut Snapshot, layout: &Layout, object: u64) -> Option<u64> {
    // Python clears the reference count of an object that it frees, and little else.
    let mut alive = memory.read_u32("an object", object.wrapping_add(layout.object_references)).ok()? != 0;
    if let Some(shared) = layout.object_shared_references.filter(|_| !alive) {
        alive = memory.read_u64("an object", object.wrapping_add(shared)).ok()? >> SHARED_MARKS != 0;
    }
    let class = memory.read_u64("an object", object.wrapping_add(layout.object_type)).ok()?;
    (alive && class >= MIN_ADDRESS && class % 8 == 0).then_some(class)
}

/// The name in a class, cut to 48 bytes. Classes written in C have that of their module before it.
pub(super) fn type_name(memory: &mut Snapshot, layout: &Layout, class: u64) -> Result<Vec<u8>, ReadError> {
    const CLASS: &str = "a class";
    let name = memory.read_u64(CLASS, class.wrapping_add(layout.type_name))?;
    let mut text = Vec::with_capacity(MAX_NAME_BYTES);
    while text.len() < MAX_NAME_BYTES {
        match memory.read_u8(CLASS, name.wrapping_add(text.len() as u64))? {
            0 => break,
            byte => text.push(byte),
        }
    }
    Ok(text)
}

/// The name of the class of an object. `None` if there is no living object at the address.
pub(super) fn class_name(memory: &mut Snapshot, layout: &Layout, object: u64) -> Option<String> {
    let class = Some(object).filter(|object| *object >= MIN_ADDRESS && object % 8 == 0);
    let class = class_of(memory, layout, class?)?;
    String::from_utf8(type_name(memory, layout, class).ok()?).ok()
}

/// The items of a list, or none if it has more than `most`.
pub(super) fn items(memory: &mut Snapshot, layout: &Layout, list: u64, most: u64) -> Vec<u64> {
    let first = memory.read_u64(LIST, list.wrapping_add(layout.list_items)).unwrap_or(0);
    items_from(memory, layout, list, first, most)
}

/// The items of a list or tuple that are stored from the address `first` on.
pub(super) fn items_from(memory: &mut Snapshot, layout: &Layout, list: u64, first: u64, most: u64) -> Vec<u64> {
    let length = memory.read_u64(LIST, list.wrapping_add(layout.bytes_length)).unwrap_or(0);
    let length = if length <= most { length } else { 0 };
    (0..length).map_while(|index| memory.read_u64(LIST, first.wrapping_add(index * 8)).ok()).collect()
}

/// The objects in a set.
pub(super) fn members(memory: &mut Snapshot, layout: &Layout, set: u64) -> Option<Vec<u64>> {
    let mut word = |address: u64| memory.read_u64("a set", address).ok();
    let header = set.wrapping_add(layout.object_size);
    let (mask, places) = (word(header.wrapping_add(SET_MASK))?, word(header.wrapping_add(SET_PLACES))?);
    let mut found = Vec::new();
    for index in 0..mask.checked_add(1)?.min(MAX_PLACES) {
        // A place has an object and its hash.
        let object = word(places.wrapping_add(index * 16))?;
        found.extend((object >= MIN_ADDRESS && object % 8 == 0).then_some(object));
    }
    Some(found)
}

fn attribute_entries(memory: &mut Snapshot, layout: &Layout, object: u64) -> Result<Entries, ReadError> {
    const OBJECT: &str = "an object";
    const TYPE: &str = "a type";
    let class = memory.read_u64(OBJECT, object.wrapping_add(layout.object_type))?;
    let flags = memory.read_u64(TYPE, class.wrapping_add(layout.type_flags))?;
    let managed_dict = layout.managed_dict.zip(layout.type_cached_keys).filter(|_| flags & MANAGED_DICT != 0);
    let Some((managed_dict, cached_keys)) = managed_dict else {
        let offset = memory.read_u64(TYPE, class.wrapping_add(layout.type_dict_offset))?.cast_signed();
        if offset <= 0 {
            return Err(ReadError { what: "the attributes of an object", address: object });
        }
        let dict = memory.read_u64(OBJECT, object.wrapping_add_signed(offset))?;
        return Entries::of_dict(memory, layout, dict);
    };
    let managed = memory.read_u64(OBJECT, object.wrapping_sub(managed_dict))?;
    let values = match layout.minor {
        // The values have a pointer of their own, before that of the dictionary.
        ..=11 => memory.read_u64(OBJECT, object.wrapping_sub(managed_dict + 8))?,
        // One pointer for both, odd if it points to the values.
        12 => {
            if managed & 1 == 1 {
                managed.wrapping_add(1)
            } else {
                0
            }
        }
        // After the object's header, or from 3.14 on after all that its base class has, unless a
        // dictionary has taken over the values.
        13.. if flags & INLINE_VALUES != 0 && managed == 0 => {
            let size = match layout.minor {
                13 => layout.object_size,
                _ => memory.read_u64(TYPE, class.wrapping_add(layout.type_name + SIZE_AFTER_NAME))?,
            };
            object.wrapping_add(size)
        }
        13.. => 0,
    };
    if values == 0 {
        return Entries::of_dict(memory, layout, managed);
    }
    let keys = memory.read_u64(TYPE, class.wrapping_add(cached_keys))?;
    Entries::of_keys(memory, layout, keys, Some(values.wrapping_add(layout.values_data)))
}
