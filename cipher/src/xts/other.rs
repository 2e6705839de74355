//! Other CPUs have no kernel of their own.

use super::expand::RoundKeys;
use super::hashed::{Groups, Job};
use super::{Backend, Block, Direction, Tweak};
use crate::layout::Page;

/// Has no value. The functions are those of the kernels for x86-64 and aarch64.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {}

impl Kernel {
    pub(crate) fn new(_: Backend) -> Option<Self> {
        None
    }

    pub(crate) fn backend(self) -> Backend {
        match self {}
    }

    pub(crate) fn run<const N: usize>(
        self,
        _: Direction,
        _: &RoundKeys<N>,
        _: Tweak,
        _: &mut [Block],
    ) {
        match self {}
    }

    pub(crate) fn seal_hashed<const N: usize>(
        self,
        _: &RoundKeys<N>,
        _: &Job<'_>,
        _: &mut Page,
        _: Groups,
        _: impl FnOnce(Block, &mut Page),
    ) {
        match self {}
    }

    pub(crate) fn open_hashed<const N: usize>(
        self,
        _: &RoundKeys<N>,
        _: &Job<'_>,
        _: &mut Page,
        _: impl FnMut(usize, &mut Page) -> usize,
    ) -> Block {
        match self {}
    }
}
