//! Empty: the generator is the test `drift`.
