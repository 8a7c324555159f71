# The short way in. Each target installs what it needs; the work is CMake's and that of scripts/.
JOBS := $(shell nproc)
FUZZ_RUNS := 1000000

.PHONY: demo test build asan tsan fuzz failures soak format tidy digests setup clean
.NOTPARALLEL:

demo: build
	scripts/demo

test: setup
	cmake --preset release
	cmake --build --preset release -j $(JOBS)
	ctest --preset release -j $(JOBS) --output-junit ctest.xml

# Leaves the command-line tool at build/release/bin/argosy; no tests, they take far longer to build.
build: setup
	cmake --preset release
	cmake --build --preset release -j $(JOBS) --target argosy_cli

# The tests under the address and undefined-behaviour sanitizers.
asan: setup
	cmake --preset asan
	cmake --build --preset asan -j $(JOBS)
	ctest --preset asan -j $(JOBS) --output-junit ctest.xml

# The tests of what has threads under the thread sanitizer.
TSAN_AREAS := exchange gemm moe platform router transport
tsan: setup
	cmake --preset tsan
	cmake --build --preset tsan -j $(JOBS) --target $(TSAN_AREAS:%=argosy_test_%)
	ctest --preset tsan -j $(JOBS) --output-junit ctest.xml \
	  -L '^($(shell echo $(TSAN_AREAS) | tr ' ' '|'))$$'

# Every reader of outside bytes under libFuzzer; FUZZ_SECONDS bounds each target.
fuzz:
	scripts/setup --dev
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS) --target argosy_fuzz
	scripts/fuzz $(FUZZ_RUNS) $(FUZZ_SECONDS)

# Every fault at every step of every rank, as a table; about ten minutes.
failures: setup
	cmake --preset release
	scripts/failures

# A million orders of messages in latency mode; 100,000 runs of one layer: memory and descriptors stay flat.
soak: build
	cmake --build --preset release -j $(JOBS) --target argosy_test_exchange
	scripts/soak

format:
	scripts/setup --dev
	scripts/check_format --fix

tidy:
	scripts/setup --dev
	cmake --preset release
	scripts/check_tidy --all

# Output digests of every layer in testdata/models, against testdata/digests.txt.
digests: build
	scripts/digests

setup:
	scripts/setup

clean:
	rm -rf build
