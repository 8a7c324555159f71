# The compile rules that hold for every target of the project.
#
# -ffp-contract=off: an FMA stands where the source says so, nowhere else (contract 4.4).
# Never -march=native: instruction sets are chosen at run time; a file that needs one gets the flag by itself.
add_library(argosy_compile INTERFACE)
target_compile_features(argosy_compile INTERFACE cxx_std_20)
target_compile_options(argosy_compile INTERFACE
  -ffp-contract=off -fno-fast-math -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 reports an overlap inside std::string operator+(const char*, string&&) that is not there.
  target_compile_options(argosy_compile INTERFACE -Wno-restrict)
endif()
if(ARGOSY_DEVELOPER)
  target_compile_options(argosy_compile INTERFACE -Werror)
endif()
if(ARGOSY_SANITIZE)
  target_compile_options(argosy_compile INTERFACE -fsanitize=${ARGOSY_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  target_link_options(argosy_compile INTERFACE -fsanitize=${ARGOSY_SANITIZE})
endif()
