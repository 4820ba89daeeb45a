//! Merges the Python frames of a thread into its native stack.
//!
//! The interpreter runs Python code in `_PyEval_EvalFrameDefault`. Up to CPython 3.10, each Python
//! frame has its own call of it; later versions have one call for each entry into the interpreter.
//! A dump does not record which Python frames belong to an entry. The position is therefore exact
//! if there is one entry, or one for every Python frame. Otherwise the native frames between the
//! entries are omitted, which keeps the order of all shown frames.

use crate::dump::Frame;

/// The function that runs Python code. Compilers append suffixes such as `.cold`.
const EVAL: &[u8] = b"_PyEval_EvalFrameDefault";

/// Prefixes of the functions with which the interpreter calls itself. They contain no information
/// about the program.
const PLUMBING: &[&[u8]] = &[
    b"PyEval_",
    b"PyObject_Call",
    b"PyObject_Vectorcall",
    b"PyRun_",
    b"PyVectorcall_",
    b"Py_BytesMain",
    b"Py_Main",
    b"Py_RunMain",
    b"_PyEval_",
    b"_PyFunction_",
    b"_PyObject_Call",
    b"_PyObject_FastCall",
    b"_PyObject_MakeTpCall",
    b"_PyObject_Vectorcall",
    b"_PyRun_",
    b"_PyVectorcall_",
    b"call_function",
    b"cfunction_",
    b"context_run",
    b"do_call_core",
    b"function_code_fastcall",
    b"method_vectorcall",
    b"object_vacall",
    b"partial_vectorcall",
    b"pymain_",
    b"pyrun_",
    b"pythread_wrapper",
    b"run_eval_code_obj",
    b"run_mod",
    b"slot_tp_",
    b"thread_run",
    b"vectorcall_",
];

/// A thread's stack with the frames of both languages, leaf first like its inputs.
pub(super) fn mix<'a>(native: &[Frame<'a>], python: &[Frame<'a>]) -> Vec<Frame<'a>> {
    let entries: Vec<usize> = (0..native.len()).filter(|&i| native[i].func.starts_with(EVAL)).collect();
    let (Some(&leafmost), Some(&rootmost)) = (entries.first(), entries.last()) else {
        // The unwinder did not reach the interpreter, or there is no native stack.
        return if python.is_empty() { native.to_vec() } else { python.to_vec() };
    };
    let mut mixed = Vec::with_capacity(native.len() + python.len());
    if entries.len() == python.len() {
        let mut frames = python.iter();
        for frame in native {
            if frame.func.starts_with(EVAL) {
                mixed.extend(frames.next());
            } else {
                push(&mut mixed, frame);
            }
        }
    } else {
        native[..leafmost].iter().for_each(|frame| push(&mut mixed, frame));
        mixed.extend(python);
        native[rootmost + 1..].iter().for_each(|frame| push(&mut mixed, frame));
    }
    mixed
}

fn push<'a>(mixed: &mut Vec<Frame<'a>>, frame: &Frame<'a>) {
    if !PLUMBING.iter().any(|prefix| frame.func.starts_with(prefix)) {
        mixed.push(*frame);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixed(native: &str, python: &str) -> String {
        let native = native.replace('*', "_PyEval_EvalFrameDefault");
        let frames = |text: &'static str| -> Vec<Frame<'static>> {
            text.split_whitespace().map(|func| Frame { func: func.as_bytes(), file: b"" }).collect()
        };
        let (native, python): (&'static str, &'static str) = (native.leak(), python.to_owned().leak());
        mix(&frames(native), &frames(python))
            .iter()
            .map(|frame| String::from_utf8_lossy(frame.func))
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn one_entry_runs_all_python_frames() {
        assert_eq!(
            mixed("sem_wait take_gil *.cold main", "get next <module>"),
            "sem_wait take_gil get next <module> main"
        );
    }

    #[test]
    fn native_frames_between_python_entries_are_kept() {
        assert_eq!(
            mixed("poll * _PyFunction_Vectorcall sort_list * Py_RunMain main", "key <module>"),
            "poll key sort_list <module> main"
        );
    }

    #[test]
    fn frames_with_an_unknown_position_are_omitted_in_order() {
        assert_eq!(mixed("poll * backward * main", "hook step <module>"), "poll hook step <module> main");
    }

    #[test]
    fn a_thread_without_python_entries_shows_one_of_its_stacks() {
        assert_eq!(mixed("poll start_thread", ""), "poll start_thread");
        assert_eq!(mixed("", "get <module>"), "get <module>");
        assert_eq!(mixed("poll", "get <module>"), "get <module>");
    }
}
