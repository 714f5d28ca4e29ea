// Definitions of symbols that are newer than glibc 2.28 and libstdc++ 8, as GCC 12 and older
// compilers call them: the library loads on systems from RHEL 8 on. building/exports.map keeps them
// in it.
#if defined(__linux__) && defined(__x86_64__)

#include <new>
#include <sstream>

extern "C" {

// glibc 2.29 has new versions of these, which differ in the handling of errors only.
double old_exp(double x) __asm__("tk_old_exp");
double old_exp2(double x) __asm__("tk_old_exp2");
__asm__(".symver tk_old_exp, exp@GLIBC_2.2.5");
__asm__(".symver tk_old_exp2, exp2@GLIBC_2.2.5");
double exp(double x) { return old_exp(x); }
double exp2(double x) { return old_exp2(x); }

// glibc 2.32. Reference counts are not atomic where it is true.
char __libc_single_threaded = 0;

}  // extern "C"

// libstdc++ 11. Weak: compilers made for old systems have it in a static library.
[[noreturn, gnu::weak]] void throw_bad_array_new_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// libstdc++ 9 and 11: constructors and str() of the streams in torch's headers.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

#endif
