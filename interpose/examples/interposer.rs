//! The library that tests/interposition.rs loads into its test program. It plans and installs what
//! the scenario names, and returns the text of the error, or null.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;

use pagevault_interpose::{Code, Error, Executable, Expected, Installed, Plan};

type Call = extern "C" fn(c_int) -> c_int;
type Read = extern "C" fn(c_int, *mut c_void, usize) -> isize;
type Lseek = extern "C" fn(c_int, i64, c_int) -> i64;
type Pwrite = extern "C" fn(c_int, *const c_void, usize, i64) -> isize;

#[derive(Default)]
struct Originals {
    shelf_read: OnceLock<Code>,
    shelf_write: OnceLock<Code>,
    complete: OnceLock<Code>,
    read: OnceLock<Code>,
    pwrite: OnceLock<Code>,
    lseek: OnceLock<Code>,
}

static ORIGINALS: Originals = Originals {
    shelf_read: OnceLock::new(),
    shelf_write: OnceLock::new(),
    complete: OnceLock::new(),
    read: OnceLock::new(),
    pwrite: OnceLock::new(),
    lseek: OnceLock::new(),
};
static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// Forwards to an `int (*)(int)` of the program and adds 1000.
fn forward(original: &OnceLock<Code>, x: c_int) -> c_int {
    let Some(code) = original.get() else { return -1 };
    // SAFETY: only functions of the program with this signature are stored in these fields.
    let call = unsafe { transmute::<*const (), Call>(code.as_ptr()) };
    call(x) + 1000
}

extern "C" fn shelf_read(x: c_int) -> c_int {
    forward(&ORIGINALS.shelf_read, x)
}

extern "C" fn shelf_write(x: c_int) -> c_int {
    forward(&ORIGINALS.shelf_write, x)
}

extern "C" fn complete(x: c_int) -> c_int {
    forward(&ORIGINALS.complete, x)
}

/// Reads, and converts the bytes that were read to upper case. It converts no more than the program
/// asks for at a time: where the program's PLT entry is canonical (`Plan::got`), reads of the
/// standard library arrive here too.
extern "C" fn read(fd: c_int, buffer: *mut c_void, size: usize) -> isize {
    let Some(code) = ORIGINALS.read.get() else { return -1 };
    // SAFETY: the field holds the `read` of the C library.
    let call = unsafe { transmute::<*const (), Read>(code.as_ptr()) };
    let got = call(fd, buffer, size);
    if let (2, Ok(len)) = (size, usize::try_from(got)) {
        // SAFETY: `read` has just filled `len` bytes of the caller's buffer.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), len) };
        bytes.make_ascii_uppercase();
    }
    got
}

/// Writes, and returns one byte more than it wrote.
extern "C" fn pwrite(fd: c_int, buffer: *const c_void, size: usize, offset: i64) -> isize {
    let Some(code) = ORIGINALS.pwrite.get() else { return -1 };
    // SAFETY: the field holds the `pwrite` of the C library.
    let call = unsafe { transmute::<*const (), Pwrite>(code.as_ptr()) };
    call(fd, buffer, size, offset) + 1
}

/// Seeks, and returns the position plus 1000.
extern "C" fn lseek(fd: c_int, offset: i64, whence: c_int) -> i64 {
    let Some(code) = ORIGINALS.lseek.get() else { return -1 };
    // SAFETY: the field holds the `lseek` of the C library.
    let call = unsafe { transmute::<*const (), Lseek>(code.as_ptr()) };
    call(fd, offset, whence) + 1000
}

const READ: *const () = shelf_read as *const ();
const WRITE: *const () = shelf_write as *const ();
const ANCHORS: [&str; 2] = ["shelf_open", "shelf_close"];

/// Plans and installs all replacements. A scenario adds one change that must make this fail.
fn run(scenario: &str) -> Result<(), Error> {
    let executable = Executable::of_this_process()?;
    let mut plan = Plan::new(&executable);
    let table = plan.table("shelves", &[("shelf_read", READ), ("shelf_write", WRITE)], &ANCHORS)?;
    ORIGINALS.shelf_read.get_or_init(|| table[0]);
    ORIGINALS.shelf_write.get_or_init(|| table[1]);
    plan.require_null("completion", 8)?;
    let original = plan.pointer("completion", 0, Expected::OwnFunction, complete as *const ())?;
    ORIGINALS.complete.get_or_init(|| original);
    let original = plan.got("read", read as *const ())?;
    ORIGINALS.read.get_or_init(|| original);
    let original = plan.got("pwrite", pwrite as *const ())?;
    ORIGINALS.pwrite.get_or_init(|| original);
    let original = plan.got("lseek", lseek as *const ())?;
    ORIGINALS.lseek.get_or_init(|| original);

    let new = complete as *const ();
    match scenario {
        "symbol missing" => drop(plan.table("shelves", &[("shelf_lend", READ)], &ANCHORS)?),
        "not an export" => drop(plan.table("shelves", &[("on_complete", READ)], &ANCHORS)?),
        "library symbol" => drop(plan.table("shelves", &[("getenv", READ)], &ANCHORS)?),
        "table twice" => drop(plan.table("twins", &[("twin_left", READ)], &["twin_right"])?),
        "table absent" => drop(plan.table("shelves", &[("lonely", READ)], &ANCHORS)?),
        "slot missing" => drop(plan.got("preadv2", new)?),
        "slot optional" => assert_eq!(plan.got_if_imported("preadv2", new)?, None),
        "object missing" => drop(plan.pointer("completions", 0, Expected::OwnFunction, new)?),
        "not an object" => drop(plan.pointer("shelf_read", 0, Expected::OwnFunction, new)?),
        "field outside" => drop(plan.pointer("completion", 24, Expected::OwnFunction, new)?),
        "field null" => drop(plan.pointer("completion", 8, Expected::OwnFunction, new)?),
        "field not null" => plan.require_null("completion", 16)?,
        "wrong value" => {
            let _ = plan.pointer("completion", 16, Expected::Exactly(table[0]), new)?;
        }
        "planned twice" => drop(plan.got("read", new)?),
        "null replacement" => drop(plan.got("close", ptr::null())?),
        "changed meanwhile" => {
            let mut other = Plan::new(&executable);
            other.got("pwrite", pwrite as *const ())?;
            // SAFETY: the replacement has the signature of `pwrite`; one thread; never unloaded.
            unsafe { other.install() }?;
        }
        _ => {}
    }
    // SAFETY: the replacements have the signatures of what they replace, this library is never
    // unloaded, and the program has one thread.
    let installed = unsafe { plan.install() }?;
    installed.verify()?;
    if scenario == "verify in a child" {
        verify_in_a_child(&installed);
    }
    let installed = INSTALLED.get_or_init(|| installed);
    assert!(installed.words() >= 5);
    if scenario == "again" { run("") } else { Ok(()) }
}

fn verify_in_a_child(installed: &Installed) {
    // SAFETY: the program has one thread; the child only reads memory and exits.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(i32::from(installed.verify().is_err()));
        }
        let mut status = -1;
        libc::waitpid(child, &raw mut status, 0);
        assert_eq!(status, 0, "the child does not see the replacements");
    }
}

/// Called by the program.
///
/// # Safety
///
/// `scenario` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn interpose(scenario: *const c_char) -> *const c_char {
    // SAFETY: a C string by contract.
    let scenario = unsafe { CStr::from_ptr(scenario) }.to_string_lossy();
    match run(&scenario) {
        Ok(()) => ptr::null(),
        Err(error) => CString::new(error.to_string()).map_or(ptr::null(), |text| text.into_raw()),
    }
}
