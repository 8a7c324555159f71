// Linked into every test: an allocation that cannot be had returns null under the sanitizers too,
// as it does without them, so that tests of kOutOfMemory run in every preset.
extern "C" const char* __asan_default_options();
extern "C" const char* __tsan_default_options();

extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1:detect_stack_use_after_return=1";
}
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "allocator_may_return_null=1:halt_on_error=1";
}
