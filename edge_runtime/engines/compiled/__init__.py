"""The engine `compiled`: packages made by AOTInductor, bound to the arena."""
