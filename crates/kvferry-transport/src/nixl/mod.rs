//! NIXL.
